"""What a run records of itself, and the numbers of a job.

May import: errors, console, engine, text, build, job.
"""
