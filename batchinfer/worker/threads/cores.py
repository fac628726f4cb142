"""Binds each computing thread to a separate core, if there are as many cores as threads.

When other processes keep the cores busy, Linux moves unbound threads. Two threads of a step may
then share a core, and all other threads wait for the two. With a busy process on each of four
cores, steps took 3.55 times as long as on a quiet machine; with bound threads, 2.36 times as long.
If the busy processes had the lowest priority, the factors were 1.35 and 1.0 (workload W1, float32,
AVX2, 2026-11-23).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from batchinfer.kernels.cpu.thread_affinity import TeamCores

_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Environment variables that choose where OpenMP threads run. If one is set, this module binds no
threads."""

Cores = Sequence[Set[int]]
"""For each thread, the logical cores that it may run on."""


def choose_cores(count: int, own: Set[int], siblings: Callable[[int], Set[int]]) -> Cores | None:
    """Choose the cores of each of ``count`` threads.

    Args:
        own: logical cores that the process may run on.
        siblings: returns the logical cores that share a physical core with a logical core.

    Returns:
        The logical cores of each thread, or None unless there are as many cores as threads. With
        more cores than threads, binding would be slower, because a bound thread cannot leave a core
        that another process uses.
    """
    if count == len(own):
        return [{core} for core in sorted(own)]
    cores = {frozenset((siblings(core) & own) | {core}) for core in own}
    return sorted(cores, key=min) if count == len(cores) else None


def core_siblings(core: int, topology: str = "/sys/devices/system/cpu") -> Set[int]:
    """Return the logical cores on the same physical core as ``core``; only ``core`` if unknown.
    Linux lists sibling cores as "0,4" or "0-1" (the kernel's
    Documentation/admin-guide/cputopology.rst).
    """
    try:
        text = Path(topology, f"cpu{core}", "topology", "thread_siblings_list").read_text("ascii")
    except (OSError, ValueError):
        return {core}
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {at for low, high in ranges for at in range(int(low), int(high or low) + 1)} | {core}


class ThreadCores:
    """Binds the OpenMP threads that compute for one Python thread, only while they compute.

    Args:
        environ: environment variables. If an OpenMP variable controls binding, this class binds
            nothing.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._is_ours = hasattr(os, "sched_setaffinity") and not any(
            environ.get(name, "").strip() for name in _VARIABLES
        )
        self._made_for: tuple[int, Set[int]] = 0, set()
        self._team: TeamCores | None = None

    @contextmanager
    def bound(self, count: int) -> Iterator[None]:
        """Bind the ``count`` OpenMP threads that compute for this Python thread inside the ``with``
        block.

        After the block, this Python thread is unbound, because threads that it starts inherit its
        cores.
        """
        if count == 1 or not self._is_ours:
            yield
            return
        allowed = os.sched_getaffinity(0)
        if self._made_for != (count, allowed):
            cores = choose_cores(count, allowed, core_siblings)
            if cores is None and self._team is not None:
                cores = [allowed] * count  # unbinds previously bound threads
            self._team = None if cores is None else TeamCores(cores)
            self._made_for = count, allowed
        if self._team is None:
            yield
            return
        self._team.bind()
        try:
            yield
        finally:
            with suppress(OSError):  # the process may have lost these cores in the meantime
                os.sched_setaffinity(0, allowed)
