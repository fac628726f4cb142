"""``batchinfer init``: writes a job file for a dataset.

May import: config, errors, console, job.
"""
