"""``batchinfer run``: decides what to do, runs rows in three threads, and ends the job.

``run_job`` is the command: ``decide`` makes the run's plan, ``pipeline`` runs the rows,
``finish_job`` ends the job. ``engine_loop`` feeds the engine, and ``dedup`` computes equal rows
once. ``in_flight_log`` records which rows run, for the next run if this run dies. ``reporter``
prints the messages.
"""
