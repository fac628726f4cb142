"""A fleet: workers that claim parts of one job, started here or by Ray on other machines.

``launcher`` starts and watches them, ``worker_process`` is what it starts, ``local_workers`` starts
it on this machine and ``ray_workers``, which alone imports Ray, on the nodes of a cluster.

May import: config, errors, process, console, engine, requests, builders, job.
"""
