"""The job file: read, checked, described to editors.

May import: config, errors, console, text, job.storage, job.input.
"""
