"""The job file: read, checked, described to editors.

May import: config, errors, near_names, console, text, job.storage, job.input.
"""
