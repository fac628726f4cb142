"""Records of runs, and the summary and status of a job.

May import: errors, process, console, engine, text, builders, job.
"""
