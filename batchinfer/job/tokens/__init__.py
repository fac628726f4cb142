"""Tokens in flight: output of unfinished rows, kept on disk for the run that goes on.

``request_key`` says whose tokens they are, ``record`` how they are stored, ``kept_outputs`` puts
increments together, ``token_files`` has the files, ``in_flight`` is the engine's side.

May import: config, engine, protocols, job.
"""
