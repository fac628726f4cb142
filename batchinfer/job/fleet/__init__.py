"""A fleet: one job on many workers, each with an engine of its own.

``leases`` is the ledger of who runs which rows, ``dispatcher`` decides on what workers tell.

May import: config, errors, process, console, engine, requests, build, job.
"""
