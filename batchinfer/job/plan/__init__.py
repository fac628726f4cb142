"""``batchinfer plan``: a job simulated before it runs.

May import: config, errors, console, engine, text, requests, builders, job.
"""
