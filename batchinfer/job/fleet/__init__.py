"""A fleet: workers that claim parts of one job, on this machine or on a Ray cluster.

``launcher`` starts and watches workers. ``worker_process`` is the program that each worker runs.
``local_workers`` starts that program on this machine, and ``ray_workers`` on a Ray cluster. Only
``ray_workers`` imports Ray.
"""
