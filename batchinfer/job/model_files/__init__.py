"""Model files told apart by what they hold.

May import: errors, console, job.storage, job.spec.
"""
