"""``batchinfer init``: a job file written for a dataset.

May import: config, errors, console, job.
"""
