"""Runs steps on a CPU's threads, as many as are good for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchinfer.engine.runner import Pending, Runner
from batchinfer.engine.step import Step
from batchinfer.worker.threads.governor import ThreadGovernor
from batchinfer.worker.threads.threads import TORCH_THREADS


class PinnedThreads:
    """A runner whose steps always compute on so many threads.

    torch has a number for each of Python's threads, and other engines of the process may have
    another, so it is set again before a step wherever it differs.
    """

    def __init__(self, runner: Runner, count: int) -> None:
        self._runner = runner
        self._count = count

    def submit(self, step: Step) -> Pending:
        """Compute one step.

        Raises:
            OutOfMemory: there is none for it.
        """
        with TORCH_THREADS.team(self._count):
            return self._runner.submit(step)


class GovernedThreads:
    """A runner whose steps compute on as many threads as a governor says.

    Args:
        runner: computes a step when it is submitted.
        governor: asked before each step, and told what it took.
        clock: seconds.
    """

    def __init__(
        self,
        runner: Runner,
        governor: ThreadGovernor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._governor = governor
        self._clock = clock

    def submit(self, step: Step) -> Pending:
        """Compute one step.

        Raises:
            OutOfMemory: there is none for it.
        """
        count = self._governor.begin()
        began = self._clock()
        with TORCH_THREADS.team(count):
            pending = self._runner.submit(step)
        self._governor.observe(step.num_tokens, self._clock() - began)
        return pending
