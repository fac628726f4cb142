"""Formats of files beside Parquet and JSON Lines, and what formats of text have in common.

May import: errors, console, job.storage, job.row_ids.
"""
