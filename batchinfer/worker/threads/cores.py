"""Which cores threads run on: each has one of its own, where there are as many.

Linux moves unbound threads about where other processes keep the cores busy; two come to lie on one
core, and all others wait for them. Beside a process that burns each of four cores steps took 3.55
times as long as alone, with bound threads 2.36 times; beside such of the lowest priority 1.35 times
and as long as alone (W1, float32, AVX2, 2026-11-23).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from batchinfer.kernels.cpu.team import TeamCores

_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Any of them set: the user has said where threads run."""
_TOPOLOGY = "/sys/devices/system/cpu"

Cores = Sequence[Set[int]]
"""Of each thread the logical cores that it may run on."""


def choose_cores(count: int, own: Set[int], siblings: Callable[[int], Set[int]]) -> Cores | None:
    """Choose the cores of each of ``count`` threads.

    Args:
        own: logical cores that the process may run on.
        siblings: the logical cores of the core that one belongs to.

    Returns:
        None where there are not as many cores as threads: other processes may use what is left.
    """
    if count == len(own):
        return [{core} for core in sorted(own)]
    cores = {frozenset((siblings(core) & own) | {core}) for core in own}
    return sorted(cores, key=min) if count == len(cores) else None


def core_siblings(core: int, topology: str = _TOPOLOGY) -> Set[int]:
    """The logical cores of the core that one belongs to; that one alone where Linux does not say.

    Format: "0,4" or "0-1" (the kernel's Documentation/admin-guide/cputopology.rst).
    """
    try:
        text = Path(topology, f"cpu{core}", "topology", "thread_siblings_list").read_text("ascii")
    except (OSError, ValueError):
        return {core}
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {at for low, high in ranges for at in range(int(low), int(high or low) + 1)} | {core}


class ThreadCores:
    """Binds the threads that compute for one of Python's while they do, and only if they are as
    many as the cores.

    Args:
        environ: with a variable of OpenMP that binds threads, or keeps them free, they are let be.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._is_ours = hasattr(os, "sched_setaffinity")
        self._is_ours &= not any(environ.get(name, "").strip() for name in _VARIABLES)
        self._asked: tuple[int, Set[int]] = 0, set()
        self._team: TeamCores | None = None

    @contextmanager
    def bound(self, count: int) -> Iterator[None]:
        """Have the team of ``count`` threads that this one begins run where it should.

        This thread itself is free again afterwards: what it starts inherits its cores.
        """
        if count == 1 or not self._is_ours:
            yield
            return
        own = os.sched_getaffinity(0)
        if self._asked != (count, own):
            self._team = self._team_of(count, own)
            self._asked = count, own
        if self._team is None:
            yield
            return
        self._team.bind()
        try:
            yield
        finally:
            with suppress(OSError):  # they were taken from the process meanwhile
                os.sched_setaffinity(0, own)

    def _team_of(self, count: int, own: Set[int]) -> TeamCores | None:
        cores = choose_cores(count, own, core_siblings)
        if cores is None and self._team is not None:
            cores = [own] * count  # they were bound
        return None if cores is None else TeamCores(cores)
