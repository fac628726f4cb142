"""A fleet: workers that claim parts of one job, started here or by Ray on other machines.

``launcher`` starts and watches workers. ``worker_process`` is a worker's program. ``local_workers``
runs it on this machine, and ``ray_workers``, the only module that imports Ray, on a cluster.

May import: config, errors, process, console, engine, requests, builders, job.
"""
