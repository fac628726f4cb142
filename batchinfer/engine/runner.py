"""The worker's interface: the engine submits steps and reads their results later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchinfer.engine.step import Step, StepResult


class OutOfMemory(Exception):  # noqa: N818
    """A runner did not have enough device or host memory for a step."""


class Pending(Protocol):
    def result(self) -> StepResult:
        """Wait for the step's result.

        Raises:
            OutOfMemory: the step ran out of memory. Steps submitted after it failed too.
            Exception: the step failed for another reason.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """A pending step that already has its result, for synchronous runners."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Runner(Protocol):
    """Computes steps: the worker, or a substitute in tests.

    Steps run in the order of submission, each as if the previous step had ended. The engine relies
    on this order: after the engine submits a step, it reassigns freed blocks, and the next step may
    read blocks that the submitted step writes. On a CUDA device, a single stream ensures this
    order.
    """

    def submit(self, step: Step) -> Pending:
        """Start a step; ``step.previous_sample`` refers to the previously submitted step.

        Raises:
            OutOfMemory: there is not enough memory for this step. Earlier steps are not affected.
            LostImageError: an image of this step cannot be loaded. Earlier steps are not affected.
        """
        ...
