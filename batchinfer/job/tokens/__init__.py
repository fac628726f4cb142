"""Tokens in flight: keeps the output of unfinished rows on disk for the next run.

``in_flight`` observes the engine, ``token_files`` reads and writes files, and ``record`` converts
tokens to and from their tables.
"""
