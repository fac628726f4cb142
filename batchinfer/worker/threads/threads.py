"""Threads that compute on the CPU: how many, and why.

torch and the C kernels share one OpenMP runtime, and all of them ask ``torch.get_num_threads()``.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from batchinfer.process.cpus import CpuLimits
from batchinfer.worker.threads.cores import ThreadCores

_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""What torch takes its number from, the first that is set."""


@dataclass(frozen=True)
class ThreadCount:
    """The most threads that compute, and why."""

    count: int
    why: str
    pinned: bool = False
    """The user said so: it is kept whatever else runs."""

    def line(self) -> str:
        """The count and its reason, for the log."""
        return f"{self.count} {'thread' if self.count == 1 else 'threads'}: {self.why}"


def choose_threads(
    asked: int | None, limits: CpuLimits, torch_count: int, environ: Mapping[str, str] = os.environ
) -> ThreadCount:
    """Choose the number of threads for this process.

    Args:
        asked: ``engine.num_threads``; wins.
        limits: cores that the process may use.
        torch_count: what torch would take: the physical cores, or what its caller set.
        environ: a number of threads there wins over ``limits``.
    """
    if asked is not None:
        return ThreadCount(asked, "engine.num_threads", pinned=True)
    for name in _VARIABLES:
        found = re.match(r"\s*([1-9][0-9]{0,5})\s*(,|$)", environ.get(name, ""))
        if found is not None:
            # torch has fewer where its caller set them since, or where there are fewer cores
            if torch_count < int(found[1]):
                return ThreadCount(torch_count, f"as torch has; {name} is {found[1]}", pinned=True)
            return ThreadCount(int(found[1]), name, pinned=True)
    if torch_count < limits.count:
        return ThreadCount(torch_count, f"as torch has; this process may use {limits.count} cores")
    return ThreadCount(limits.count, _reason(limits))


def _reason(limits: CpuLimits) -> str:
    cores = min(limits.machine, limits.affinity)
    if limits.count < cores:
        quota = f"{limits.quota:.3g} {'core' if limits.quota == 1 else 'cores'}"
        return f"the control group's quota of {quota}; the machine has {limits.machine}"
    if cores < limits.machine:
        return f"the cores this process may use; the machine has {limits.machine}"
    return "the cores this process may use"


class TorchThreads:
    """torch's number of threads, which outlives an engine: as it was found, and as it is set."""

    def __init__(self) -> None:
        self._found = 0
        self._last = 0
        """What engines set last, in whichever thread; torch gives it to threads begun later."""
        self._here = threading.local()
        """What they set last in each of Python's threads, for which torch has a number each, and
        the cores of the threads that compute for it."""

    def found(self) -> int:
        """The number of threads as it would be without engines."""
        count = torch.get_num_threads()
        if count != getattr(self._here, "last", self._last):
            self._found = count
        return self._found

    def set(self, count: int) -> None:
        """Compute on ``count`` threads from here on, in this thread and in those begun later."""
        self.found()
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
            self._last = count
        self._here.last = count

    @contextmanager
    def team(self, count: int) -> Iterator[None]:
        """Compute on ``count`` threads meanwhile, each on a core of its own where there are as
        many; as ``set`` does afterwards."""
        self.set(count)
        if not hasattr(self._here, "cores"):
            self._here.cores = ThreadCores()
        with self._here.cores.bound(count):
            yield


TORCH_THREADS = TorchThreads()
"""Of this process."""
