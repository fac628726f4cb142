"""The process of a job: signals, garbage collection, threads, and the cores that it may use.

May import: errors.
"""
