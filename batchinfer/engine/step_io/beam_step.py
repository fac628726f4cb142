"""Advances beam searches with a step's result, and sets up the beams of the next step."""

from __future__ import annotations

import numpy as np

from batchinfer.engine.beam_search import BeamSearch, Continuation
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.sequence import RequestState, Sequence
from batchinfer.engine.step import Bool, Int64, StepResult
from batchinfer.engine.step_io.failures import NAN_LOGITS, NO_TOKEN_LEFT, Failure, grammar_failure
from batchinfer.engine.step_io.in_flight import SampledRows
from batchinfer.protocols import GrammarState

States = dict[RequestState, None]
"""An ordered set of states."""


def process_beams(
    scheduler: Scheduler, sampled: SampledRows, result: StepResult, now: float
) -> tuple[States, dict[RequestState, Failure]]:
    """Advance each beam search by a token.

    All beams of a group are sampled in the same step (see ``BeamGroups.trim_to_whole_groups``). No
    later step includes these beams before this function has run.

    Args:
        result: one sample per beam, with its candidates.
        now: time on the engine's clock, in seconds.

    Returns:
        Requests whose search has ended, and the failures of requests that still run.
    """
    places = {sequence: at for at, sequence in enumerate(sampled.sequences)}
    done: States = {}
    failed: dict[RequestState, Failure] = {}
    broken = _have_broken_logits(result)
    for state in dict.fromkeys(sequence.state for sequence in places):
        at = np.array([places[beam] for beam in state.samples])
        if state.first_token_at is None:
            state.first_token_at = now
        if broken[at].any() or (state.scores is not None and state.scores.nonfinite):
            failed[state] = NAN_LOGITS
            continue
        at_limit = bool(sampled.at_limit[at[0]])
        continuations = _advance(state, at, result, at_limit=at_limit)
        stopped = np.full(len(at), not continuations and not at_limit)
        scheduler.output_lengths.observe(sampled.lengths[at], stopped)
        if continuations:
            _replace(scheduler, state, continuations)
            if error := _grammar_error(state):
                failed[state] = grammar_failure(error)
        elif not _search(state).finished:
            failed[state] = NO_TOKEN_LEFT
        else:
            _end(scheduler, state)
            done[state] = None
    return done, failed


def _have_broken_logits(result: StepResult) -> Bool:
    """Return [K] True where logits are NaN or infinite. A beam without any possible token is not
    broken: the search drops it."""
    excluded = result.no_token_left
    return result.nonfinite if excluded is None else result.nonfinite & ~excluded


def _search(state: RequestState) -> BeamSearch:
    assert state.search is not None
    return state.search


def _advance(
    state: RequestState, at: Int64, result: StepResult, *, at_limit: bool
) -> list[Continuation]:
    """Return the search's next beams, from the candidates of samples ``at`` [B]."""
    assert result.top_token_ids is not None
    assert result.top_logprobs is not None
    wanted = state.request.num_candidates
    return _search(state).advance(
        state.samples,
        result.top_token_ids[at, :wanted],
        result.top_logprobs[at, :wanted],
        at_limit=at_limit,
    )


def _replace(scheduler: Scheduler, state: RequestState, continuations: list[Continuation]) -> None:
    """Replace the current beams with the next beams, which share their blocks."""
    state.note_peak_blocks()
    present = state.samples
    outputs_before = [beam.output_ids for beam in present]
    grammar_states = [_forked_grammar(present[c.beam], c.token_id) for c in continuations]
    continued: set[int] = set()
    state.samples = []
    for continuation, grammar_state in zip(continuations, grammar_states, strict=True):
        beam = present[continuation.beam]
        if continuation.beam in continued:
            beam = Sequence(state, 0)
        continued.add(continuation.beam)
        beam.output_ids = [*outputs_before[continuation.beam], continuation.token_id]
        beam.cumulative_logprob = continuation.cumulative_logprob
        beam.logprobs, beam.stop_checker = continuation.logprobs, continuation.stop_checker
        beam.grammar_state = grammar_state
        state.samples.append(beam)
    parents = [continuation.beam for continuation in continuations]
    scheduler.beam_groups.replace(present, list(zip(state.samples, parents, strict=True)))


def _forked_grammar(beam: Sequence, token_id: int) -> GrammarState | None:
    """Return a copy of the beam's grammar state, advanced by a token.

    A token that the grammar forces also takes a whole step, because all beams must have the same
    length.
    """
    if beam.grammar_state is None:
        return None
    state = beam.grammar_state.fork()
    state.replay([token_id])
    return state


def _grammar_error(state: RequestState) -> str | None:
    errors = (beam.grammar_state.error for beam in state.samples if beam.grammar_state is not None)
    return next((error for error in errors if error is not None), None)


def _end(scheduler: Scheduler, state: RequestState) -> None:
    """Free the beams' rows and blocks and store the search's outputs."""
    for beam in state.samples:
        if beam.row >= 0:
            scheduler.finish(beam)
    state.samples.clear()
    state.finished = dict(enumerate(_search(state).outputs()))
