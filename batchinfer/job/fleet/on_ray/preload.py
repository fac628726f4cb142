"""Imported by the processes of a local cluster before there is work: what takes a worker seconds.

As the program itself does (``__main__``, ``run``), and Ray does not: without packages that are
never used, and without collecting garbage among a million objects that all stay. That halves it.
"""

from __future__ import annotations

from batchinfer.process.process import gc_paused, skip_optional_imports

skip_optional_imports()
with gc_paused():
    import batchinfer.builders.engine
    import batchinfer.job.fleet.on_ray.ray_workers  # noqa: F401
