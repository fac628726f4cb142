"""Recovery from out-of-memory errors: smaller steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchinfer.engine.runner import OutOfMemory
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.step_io.in_flight import InFlight
from batchinfer.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Recovered:
    """Outcome of a recovery, for the log."""

    reason: str
    """The device's message."""
    num_preempted: int
    """Sequences that lost their blocks."""
    max_num_batched_tokens: int
    """Most tokens in a step from now on."""

    def __str__(self) -> str:
        return (
            f"out of memory: {self.reason}; {self.num_preempted} sequences are preempted, and "
            f"max_num_batched_tokens is {self.max_num_batched_tokens} from now on"
        )


def recover(scheduler: Scheduler, lost: Iterable[InFlight], error: OutOfMemory) -> Recovered:
    """Discard unconfirmed results, requeue all sequences, and halve the token limit of a step.

    Confirmed blocks of prompts are found again. Known tokens stay; those of lost steps are drawn
    again and are the same. The smaller limit is permanent: weights and pool do not change, so a
    larger step would fail again and cost a recomputation, while half the tokens slow a step little.

    Args:
        scheduler: with a scheduled step that was not submitted, or with ``lost`` steps in flight.
        lost: steps in flight whose results are discarded.
        error: the runner's.

    Raises:
        DeviceError: steps cannot be smaller.
    """
    for state in {sequence.state for sequence in scheduler.table.running()}:
        state.note_peak_blocks()
    running = scheduler.withdraw()
    for sequence in running:
        sequence.state.stats.preemptions += 1
    leaders = dict.fromkeys(sequence.group[0] for sequence in (*running, *_retired(lost)))
    newest_first = sorted(leaders, key=lambda one: (one.state.arrival, one.index), reverse=True)
    for sequence in newest_first:
        scheduler.requeue(sequence)
    most = scheduler.max_num_batched_tokens
    least = max((sequence.request.group_size for sequence in scheduler.waiting), default=0)
    if most <= least:
        raise DeviceError(
            "the device has no memory for the smallest step "
            f"(engine.max_num_batched_tokens {most}): {error}",
            hint="free memory that other processes use, or make the KV pool smaller: lower "
            "engine.kv_cache_memory or engine.gpu_memory_utilization; then run again",
        )
    scheduler.max_num_batched_tokens = max(most // 2, least)
    return Recovered(str(error), len(running), scheduler.max_num_batched_tokens)


def _retired(lost: Iterable[InFlight]) -> list[Sequence]:
    """Unfinished sequences that left their rows when the lost steps were submitted."""
    sampled = [sequence for step in lost for sequence in step.sampled.sequences]
    retired = [sequence for sequence in sampled if sequence in sequence.state.samples]
    for sequence in retired:
        sequence.released_blocks = []
    return retired
