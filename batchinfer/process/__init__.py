"""The process of a job: signals, the garbage collector, threads, and the cores it may use.

May import: errors.
"""
