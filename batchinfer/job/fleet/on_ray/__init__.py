"""A fleet's processes on Ray, which starts them and carries messages, in a process of its own.

``process`` is the driver's side of that process, ``main`` what it runs, in which ``workers`` are
actors of a ``cluster``, this machine's own or another; ``reach`` finds out whether anything listens
at a cluster's place, ``pulse`` whether a silent worker computes.
"""
