"""A fleet: workers that claim parts of one job, on this machine or on a Ray cluster.

``launcher`` starts and watches workers. ``worker_process`` is the program of a worker.
``local_workers`` runs it on this machine, and ``ray_workers`` runs it on a Ray cluster. Only
``ray_workers`` imports Ray.
"""
