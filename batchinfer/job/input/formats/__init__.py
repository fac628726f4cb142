"""Formats other than Parquet and JSON Lines, and the base class of text formats.

May import: errors, console, job.storage, job.row_ids.
"""
