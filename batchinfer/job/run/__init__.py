"""``batchinfer run``: three threads, the engine's loop, and what is said of it.

``run`` is the command: ``begin`` decides what is to be made, ``parts`` makes it, ``end`` ends the
job. ``pipeline`` has the threads of it (``threads``), ``engine_loop`` the one that has the
engine. ``dedup`` has equal rows computed once, ``in_flight_log`` tells the next run what ran when
this one died, ``reporter`` is what is said of it.

May import: config, errors, process, console, text, engine, requests, builders, job.
"""
