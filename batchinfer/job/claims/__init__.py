"""Decides which process writes which parts: one run, shards, or workers that claim parts.

``claim`` gives one run the exclusive right to write, and ``shared_claim`` lets several writers
share an output. ``part_queue`` gives a run its parts, and ``worker_queue`` claims parts for a
worker. ``generation`` and ``swap_generation`` handle updates, ``writers`` defines the names and
locks of writers, ``crashed_rows`` finds rows that kill processes, and ``kernels`` stores the choice
of kernels. Functions that write to the output directory raise StorageError if the file system
refuses.
"""
