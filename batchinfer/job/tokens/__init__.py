"""Tokens in flight: output of unfinished rows, kept on disk for the run that goes on.

``in_flight`` observes the engine, ``token_files`` has the files, ``record`` how they are stored.

May import: errors, console, engine, protocols, job.
"""
