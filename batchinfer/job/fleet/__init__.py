"""A fleet: one job on many workers, each with an engine of its own.

``leases`` is the ledger of who runs which rows by which ``lease``, and ``open_parts`` what of parts
is free; ``dispatcher`` decides on what workers tell, ``suspects`` on what they have died of, and
``driver`` does it: it alone publishes parts and deletes segments. ``boots`` has workers started and
says on which nodes, ``losses`` is what goes with a worker that dies. ``worker`` runs leases
(``lease_run``) on one engine and tells how it goes (``worker_reports``), in a process that ``boot``
begins; ``messages`` go between the two, ``workers`` is what the driver sees of them. ``on_ray``
starts and reaches the processes; ``files`` brings what workers write to its place; ``run_fleet``
puts all of it together.

May import: config, errors, process, console, engine, requests, builders, job.
"""
