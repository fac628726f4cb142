"""``batchinfer run``: decides what to do, runs rows in three threads, and ends the job.

``run_job`` is the command: ``decide`` makes its plan, ``pipeline`` runs the rows, ``finish_job``
ends the job. ``engine_loop`` is the thread with the engine, ``dedup`` computes equal rows once,
``in_flight_log`` shows the next run which rows ran when this one died, ``reporter`` has the
messages.

May import: config, errors, process, console, text, engine, requests, builders, job.
"""
