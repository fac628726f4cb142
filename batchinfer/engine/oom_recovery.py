"""Recovers from out-of-memory errors by running smaller steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchinfer.engine.runner import OutOfMemory
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.step_io.failed_step import requeue_all
from batchinfer.engine.step_io.in_flight import InFlight
from batchinfer.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Recovered:
    """Describes a recovery from an out-of-memory error, for the log."""

    reason: str
    """The device's error message."""
    num_preempted: int
    max_num_batched_tokens: int

    def __str__(self) -> str:
        return (
            f"out of memory: {self.reason}; {self.num_preempted} sequences were preempted, and "
            f"max_num_batched_tokens is now {self.max_num_batched_tokens}"
        )


def recover(scheduler: Scheduler, lost: Iterable[InFlight], error: OutOfMemory) -> Recovered:
    """Requeue all sequences (``requeue_all``), and halve the token limit of a step.

    The smaller limit is permanent: the weights and the pool keep their size, so a larger step would
    fail again and cost another recomputation. With half as many tokens, steps are only slightly
    less efficient.

    Args:
        scheduler: has either scheduled a step that was not submitted, or submitted the steps in
            ``lost``.
        lost: steps in flight, whose results are discarded.

    Raises:
        DeviceError: the token limit cannot be lowered further.
    """
    running = requeue_all(scheduler, lost)
    most = scheduler.max_num_batched_tokens
    least = max((sequence.request.least_step_tokens for sequence in scheduler.waiting), default=0)
    if most <= least:
        raise DeviceError(
            "the device has too little memory for the smallest step "
            f"(engine.max_num_batched_tokens: {most}): {error}",
            hint="free memory that other processes use, or make the KV pool smaller: lower "
            "engine.kv_cache_memory or engine.gpu_memory_utilization; then run again",
        )
    scheduler.max_num_batched_tokens = max(most // 2, least)
    return Recovered(str(error), len(running), scheduler.max_num_batched_tokens)
