"""What a run records of itself, and the numbers of a job.

May import: errors, process, console, engine, text, builders, job.
"""
