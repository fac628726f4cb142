"""Decides which process makes which parts: one run, shards, or workers that claim parts.

``claim`` is the right of a run that writes alone, ``shared`` that of one of several writers.
``queue`` gives a run its parts, ``worker_queue`` gives a worker the parts that it claims.
``generation`` and ``swap_generation`` are for updates, ``writers`` has names and locks, ``crashes``
finds rows that kill processes, and ``kernels`` keeps the choice of kernels.

May import: errors, console, job.
"""
