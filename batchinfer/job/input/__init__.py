"""The dataset: its files, formats, columns and selected rows.

May import: errors, console, job.storage, job.row_ids.
"""
