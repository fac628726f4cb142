"""The next generation of an output: built beside the one there is, then put in its place.

May import: errors, console, job.
"""
