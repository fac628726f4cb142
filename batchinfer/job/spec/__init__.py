"""The job file: reads and checks it, and describes it to editors.

May import: config, errors, near_names, console, text, job.storage, job.input.
"""
