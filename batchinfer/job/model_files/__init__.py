"""Model files told apart by what they hold.

May import: errors, job.storage, job.spec.
"""
