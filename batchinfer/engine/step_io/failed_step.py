"""Recovers from a failed step: requeues its sequences, and fails requests whose image is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from batchinfer.engine.images import LostImageError, PromptImage
from batchinfer.engine.request import Completion
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.sequence import RequestState, Sequence
from batchinfer.engine.step_io.finish_request import complete, fail_request
from batchinfer.engine.step_io.in_flight import InFlight

_CODE = "invalid_image"


def requeue_all(scheduler: Scheduler, lost: Iterable[InFlight]) -> list[Sequence]:
    """Discard unconfirmed results, and requeue all sequences in the order of their arrival.

    Prefix lookups still find confirmed prompt blocks. Sequences keep their known tokens, and later
    steps draw the lost tokens again with the same result.

    Args:
        scheduler: has either scheduled a step that was not submitted, or submitted the steps in
            ``lost``.
        lost: steps in flight, whose results are discarded.

    Returns:
        The sequences that ran.
    """
    for state in {sequence.state for sequence in scheduler.table.running()}:
        state.note_peak_blocks()
    running = scheduler.withdraw()
    for sequence in running:
        sequence.state.stats.preemptions += 1
    leaders = dict.fromkeys(sequence.group[0] for sequence in (*running, *_retired(lost)))
    newest_first = sorted(leaders, key=lambda s: (s.state.arrival, s.index), reverse=True)
    for sequence in newest_first:
        scheduler.requeue(sequence)
    return running


def fail_requests_with(
    scheduler: Scheduler, states: Collection[RequestState], error: LostImageError, now: float
) -> list[Completion]:
    """Fail the requests that still need a lost image, and requeue the sequences of all others.

    A sequence that has already computed the image no longer needs it.

    Args:
        scheduler: has scheduled the step that failed; no step is in flight.
        states: the running and waiting requests.
        now: time on the engine's clock, in seconds.

    Returns:
        The completions of the failed requests.
    """
    needing = [state for state in states if _needs(scheduler, state, error.token_id)]
    assert needing, "no request needs the lost image"
    requeue_all(scheduler, ())
    for state in needing:
        fail_request(scheduler, state, is_nan=False)
        # The request may not have been admitted before.
        state.admitted_at = now if state.admitted_at is None else state.admitted_at
        state.first_token_at = now if state.first_token_at is None else state.first_token_at
    return [complete(state, (_CODE, error.reason), now) for state in needing]


def _needs(scheduler: Scheduler, state: RequestState, token_id: int) -> bool:
    images = [each for each in state.request.images if each.image.token_id == token_id]
    return any(_is_behind(scheduler, sample, images) for sample in state.samples)


def _is_behind(scheduler: Scheduler, sequence: Sequence, images: list[PromptImage]) -> bool:
    """Return True if a sequence has not computed all tokens of ``images``."""
    computed = 0 if sequence.row < 0 else int(scheduler.table.num_computed[sequence.row])
    return any(int(each.positions[-1]) >= computed for each in images)


def _retired(lost: Iterable[InFlight]) -> list[Sequence]:
    """Return unfinished sequences whose table rows were freed when their step was submitted."""
    sampled = [sequence for step in lost for sequence in step.sampled.sequences]
    retired = [sequence for sequence in sampled if sequence in sequence.state.samples]
    for sequence in retired:
        sequence.released_blocks = []
    return retired
