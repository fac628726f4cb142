"""Decides which process writes which parts: one run, shards, or workers that claim parts.

``claim`` is for a run that writes alone, ``shared`` for several writers. ``queue`` gives a run its
parts, and ``worker_queue`` gives a worker the parts that it claims. ``generation`` and
``swap_generation`` are for updates, ``writers`` has the names and locks of writers,
``crashed_rows`` finds rows that kill processes, and ``kernels`` stores the choice of kernels.
"""
