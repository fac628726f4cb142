"""``batchinfer init``: a job file written for a dataset.

May import: errors, console, job.
"""
