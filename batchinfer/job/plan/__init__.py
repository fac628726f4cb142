"""``batchinfer plan``: simulates a job before it runs.

May import: config, errors, console, engine, text, requests, builders, job.
"""
