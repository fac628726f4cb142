"""Chooses the number of threads that compute on the CPU, and runs steps on them.

torch and the C kernels share one OpenMP runtime, and both use ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from batchinfer.engine.runner import Pending, Runner
from batchinfer.engine.step import Step
from batchinfer.process.cpus import CpuLimits
from batchinfer.worker.threads.cores import ThreadCores
from batchinfer.worker.threads.governor import ThreadGovernor

_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Environment variables for torch's number of threads; torch uses the first variable that is
set."""


@dataclass(frozen=True)
class ThreadCount:
    """The largest number of threads that compute, and the reason for it."""

    count: int
    why: str
    pinned: bool = False
    """True if the user set the number, so that it never changes."""

    def line(self) -> str:
        return f"{self.count} {'thread' if self.count == 1 else 'threads'}: {self.why}"


def choose_threads(
    num_threads: int | None,
    limits: CpuLimits,
    torch_count: int,
    environ: Mapping[str, str] = os.environ,
) -> ThreadCount:
    """Choose the number of threads for this process.

    Args:
        num_threads: ``engine.num_threads``, which has the highest priority.
        limits: cores that the process may use.
        torch_count: torch's choice: the number of physical cores, or the number that a caller set.
        environ: environment variables, whose number of threads has priority over ``limits``.
    """
    if num_threads is not None:
        return ThreadCount(num_threads, "engine.num_threads", pinned=True)
    for name in _VARIABLES:
        variable = re.match(r"\s*([1-9][0-9]{0,5})\s*(,|$)", environ.get(name, ""))
        if variable is not None:
            # torch has fewer threads than the variable if a caller set fewer, or if there are fewer
            # cores
            if torch_count < int(variable[1]):
                return ThreadCount(
                    torch_count, f"torch's current setting; {name} is {variable[1]}", pinned=True
                )
            return ThreadCount(int(variable[1]), name, pinned=True)
    if torch_count < limits.count:
        return ThreadCount(
            torch_count, f"torch's current setting; this process may use {limits.count} cores"
        )
    cores, why = min(limits.machine, limits.affinity), "the cores this process may use"
    if limits.count < cores:
        why = f"the control group's quota of {limits.quota:.3g} core{'s' * (limits.quota != 1)}"
    if limits.count < limits.machine:
        why += f"; the machine has {limits.machine}"
    return ThreadCount(limits.count, why)


class TorchThreads:
    """Sets torch's number of threads, and remembers the number from before any engine was used."""

    def __init__(self) -> None:
        self._default = 0
        self._last = 0
        """Number of threads that an engine set last, in any Python thread. Python threads that
        start later inherit this number."""
        self._here = threading.local()
        """For each Python thread, the number that an engine set last, and the cores of its OpenMP
        threads."""

    def default(self) -> int:
        """Return the number of threads that torch would have without engines."""
        count = torch.get_num_threads()
        if count != getattr(self._here, "last", self._last):
            self._default = count
        return self._default

    def set(self, count: int) -> None:
        """Make torch use ``count`` threads in this Python thread and in Python threads that start
        later."""
        self.default()
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
            self._last = count
        self._here.last = count

    @contextmanager
    def team(self, count: int) -> Iterator[None]:
        """Set the number of OpenMP threads. Inside the ``with`` block, bind each OpenMP thread to a
        core if there are as many cores as threads."""
        self.set(count)
        if not hasattr(self._here, "cores"):
            self._here.cores = ThreadCores()
        with self._here.cores.bound(count):
            yield


TORCH_THREADS = TorchThreads()


class StepThreads:
    """Threads that compute steps: always ``count``, or the number that a governor chooses.

    torch keeps a separate number of threads for each Python thread, and other engines in the
    process may set another number, so each step sets the number again.

    Args:
        governed: true to let a governor choose up to ``count`` threads, unless the user set the
            number. Use this only for batch-invariant kernels, whose results do not depend on the
            number of threads.
        clock: returns seconds.
    """

    def __init__(
        self,
        count: ThreadCount,
        *,
        governed: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._count, self._clock = count.count, clock
        self.governor: ThreadGovernor | None = None
        if governed and not count.pinned and count.count > 1:
            self.governor = ThreadGovernor(count.count)

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        count = self._count if self.governor is None else self.governor.begin()
        began = self._clock()
        with TORCH_THREADS.team(count):
            yield
        if self.governor is not None:
            self.governor.observe(num_tokens, self._clock() - began)


class ThreadedRunner:
    """Runs the steps of ``runner`` on ``threads``. ``runner.submit`` must not return before the
    step is finished."""

    def __init__(self, runner: Runner, threads: StepThreads) -> None:
        self._runner, self._threads = runner, threads

    def submit(self, step: Step) -> Pending:
        with self._threads.step(step.num_tokens):
            return self._runner.submit(step)
