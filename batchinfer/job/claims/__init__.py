"""Who makes which parts of an output: one run, shards, or workers that claim parts.

``claim`` is the right of a run that writes alone, ``shared`` that of one of several processes,
``generation`` that of a run that updates an output, which ``swap`` then replaces. ``queue`` gives a
run its parts, ``worker_queue`` those that a worker claims. ``writers`` has the locks, ``crashes``
the rows that processes died of.

May import: errors, console, job.
"""
