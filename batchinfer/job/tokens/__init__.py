"""Tokens in flight: keeps the output of unfinished rows on disk for the next run.

``in_flight`` observes the engine, ``token_files`` reads and writes files, and ``token_tables``
converts tokens to and from tables. ``resume_pace`` limits how many rows resume at once.
"""
