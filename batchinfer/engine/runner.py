"""The interface of the worker: a step is submitted now, its result is read later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchinfer.engine.step import Step, StepResult


class OutOfMemory(Exception):  # noqa: N818
    """The device, or the host for it, has no memory for a step; raised by runners."""


class Pending(Protocol):
    """A step that was submitted."""

    def result(self) -> StepResult:
        """Wait for the step's result.

        Raises:
            OutOfMemory: the step failed for want of memory, and with it those submitted after it.
            Exception: whatever else made the step fail after it was submitted.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """The pending step of a runner that computes at once."""

    value: StepResult

    def result(self) -> StepResult:
        """The step's result."""
        return self.value


class Runner(Protocol):
    """Computes steps: the worker, or a stand-in in tests.

    Steps run in the order they are submitted, each as if it began when the one before had ended.
    The engine relies on it: it gives a block to another sequence, and lets what a step writes be
    found by the next, as soon as the step is submitted. On a CUDA device one stream does that.
    """

    def submit(self, step: Step) -> Pending:
        """Start a step. ``step.previous_sample`` refers to the step submitted before.

        Raises:
            OutOfMemory: there is no memory for this step; those before it are not affected.
        """
        ...
