"""Rows that other outputs hold already: found by their keys, copied and not computed.

May import: errors, console, requests, job.
"""
