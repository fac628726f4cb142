"""A fleet's processes on Ray, which starts them, carries messages, and tells when they die.

``ray_workers`` are the workers, as actors in a cluster that ``ray_cluster`` has joined or begun; no
other modules import Ray. They are in a process of their own, ``ray_main``, that ``joiner`` begins
and ``ray_process`` is the driver's side of. ``reach`` finds out whether anything listens at a
cluster's place, ``pulse`` whether a silent worker computes; ``preload`` is what workers import
first.

May import: config, errors, process, console, engine, requests, builders, job.
"""
