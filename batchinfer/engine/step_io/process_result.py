"""Processes a step's result: appends its tokens, forks samples, and ends samples that stop.

If the next step is already in flight, a stop is seen one step late. The sequence's row and blocks
can be freed nevertheless, because no submitted step reuses them (see ``Runner``). The token that
the next step draws for the sequence is dropped when that step is processed.
"""

from __future__ import annotations

import numpy as np

from batchinfer.engine.request import Completion, TokenLogprobs
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.sequence import RequestState, Sequence
from batchinfer.engine.step import Bool, Int32, StepResult
from batchinfer.engine.step_io.beam_step import process_beams
from batchinfer.engine.step_io.failures import NAN_LOGITS, NO_TOKEN_LEFT, Failure, grammar_failure
from batchinfer.engine.step_io.finish_request import complete, fail_request, finish_sample
from batchinfer.engine.step_io.in_flight import InFlight, SampledRows
from batchinfer.engine.step_io.scored_prompts import process_scores
from batchinfer.engine.step_io.stop_conditions import find_stops


def process_result(
    scheduler: Scheduler, step: InFlight, result: StepResult, now: float
) -> list[Completion]:
    """Apply the result of the oldest submitted step; return the requests that it finishes.

    Args:
        scheduler: the scheduler that submitted this step, and perhaps the next step.
        result: the K samples (K = sum of ``samples_per_row``) and the scored prompt tokens.
        now: time on the engine's clock, in seconds.
    """
    scheduler.pool.confirm()
    process_scores(step.scored, result.scored)
    _note_hidden_states(step.sampled, result)
    sampled, result, running = _without_ended(scheduler.table, step.sampled, result)
    states: dict[RequestState, None] = {}
    errors: dict[RequestState, Failure] = {}
    beams = sampled.is_beam
    if beams.any():
        beam_result = result.only(np.repeat(beams, sampled.samples_per_row))
        states, errors = process_beams(scheduler, sampled.only(beams), beam_result, now)
        result = result.only(np.repeat(~beams, sampled.samples_per_row))
        sampled, running = sampled.only(~beams), running[~beams]
    sequences = _with_new_samples(sampled)
    for sequence, token, logprob in zip(
        sequences, result.token_ids.tolist(), result.logprobs.tolist(), strict=True
    ):
        sequence.output_ids.append(token)
        sequence.cumulative_logprob += logprob
    _note_last_tokens(scheduler.table, sampled, running, result)
    samples = sampled
    if len(sequences) > len(sampled.rows):
        samples = sampled.only(np.repeat(np.arange(len(sampled.rows)), sampled.samples_per_row))
    _note_logprobs(sequences, samples.num_logprobs, result)
    stop_result = find_stops(scheduler.table, samples, sequences, result)
    failed = result.nonfinite | _prompt_has_nan(samples, sequences)
    failed[list(stop_result.broken)] = True
    stopped = np.zeros(len(sequences), dtype=np.bool_)
    stopped[list(stop_result.stops)] = True
    scheduler.output_lengths.observe(stop_result.lengths, stopped)

    for at in np.flatnonzero(samples.is_first).tolist():
        state = sequences[at].state
        if state.first_token_at is None:
            state.first_token_at = now
    ended = stopped | stop_result.at_limit
    _fork(scheduler, sampled, running, sequences, ended | failed)
    for at in np.flatnonzero(ended & ~failed).tolist():
        states[sequences[at].state] = None
        finish_sample(scheduler, sequences[at], stop_result.stops.get(at))
    for at in np.flatnonzero(failed).tolist():
        errors[sequences[at].state] = _failure(result, at, stop_result.broken.get(at))
    states |= dict.fromkeys(errors)
    for state, failure in errors.items():
        fail_request(scheduler, state, is_nan=failure is NAN_LOGITS)
    return [complete(state, errors.get(state), now) for state in states if not state.samples]


def _failure(result: StepResult, at: int, broken: str | None) -> Failure:
    if broken is not None:
        return grammar_failure(broken)
    return NO_TOKEN_LEFT if result.lacks_token(at) else NAN_LOGITS


def _without_ended(
    table: SequenceTable, sampled: SampledRows, result: StepResult
) -> tuple[SampledRows, StepResult, Bool]:
    """Remove rows whose sequences ended in an earlier step.

    Returns:
        The remaining R rows and their results, and [R] True for sequences that still have a table
        row. A sequence that reaches its length limit with this step no longer has a row.
    """
    running = table.active[sampled.rows] & (table.admission[sampled.rows] == sampled.admission)
    alive = running.copy()
    for at in np.flatnonzero(~running):
        sequence = sampled.sequences[at]
        alive[at] = sequence in sequence.state.samples
    if alive.all():
        return sampled, result, running
    kept = np.repeat(alive, sampled.samples_per_row)
    return sampled.only(alive), result.only(kept), running[alive]


def _with_new_samples(sampled: SampledRows) -> list[Sequence]:
    """Create the further samples of rows that draw several samples; return the sequences of all K
    samples."""
    leaders: list[Sequence] = sampled.sequences.tolist()
    if len(leaders) == sampled.samples_per_row.sum():
        return leaders
    sequences = []
    for leader, count in zip(leaders, sampled.samples_per_row.tolist(), strict=True):
        sequences.append(leader)
        for index in range(1, count):
            sample = Sequence(leader.state, leader.index + index)
            leader.state.samples.append(sample)
            sequences.append(sample)
    return sequences


def _note_last_tokens(
    table: SequenceTable, sampled: SampledRows, running: Bool, result: StepResult
) -> None:
    """Write the drawn tokens to the table, for rows that no later step has sampled."""
    last = running & (table.num_tokens[sampled.rows] == sampled.num_tokens)
    rows, first = sampled.rows[last], np.cumsum(sampled.samples_per_row) - sampled.samples_per_row
    table.last_token[rows] = result.token_ids[first[last]]
    table.sample_at[rows] = -1


def _note_hidden_states(sampled: SampledRows, result: StepResult) -> None:
    if result.hidden_states is not None:
        rows = zip(sampled.sequences[sampled.pools], result.hidden_states, strict=True)
        for sequence, hidden_state in rows:
            sequence.state.hidden_state = hidden_state


def _note_logprobs(sequences: list[Sequence], wanted: Int32, result: StepResult) -> None:
    if result.ranks is None:
        return
    assert result.top_token_ids is not None
    assert result.top_logprobs is not None
    for at in np.flatnonzero(wanted >= 0):
        count = int(wanted[at])
        top = zip(
            result.top_token_ids[at, :count].tolist(),
            result.top_logprobs[at, :count].tolist(),
            strict=True,
        )
        logprobs, names = sequences[at].logprobs, sequences[at].request.named_token_ids
        named = () if result.named_logprobs is None else result.named_logprobs[at].tolist()
        assert logprobs is not None
        logprobs.append(
            TokenLogprobs(
                token_id=int(result.token_ids[at]),
                logprob=float(result.logprobs[at]),
                rank=int(result.ranks[at]),
                top=tuple(top),
                named=tuple(zip(names, named, strict=False)),
            )
        )


def _prompt_has_nan(samples: SampledRows, sequences: list[Sequence]) -> Bool:
    """Return [K] True where logits of the prompt were not finite.

    All logits of a prompt are known when its first samples are drawn.
    """
    has_nonfinite = np.zeros(len(sequences), dtype=np.bool_)
    first = samples.is_first | (samples.lengths == 1)
    for at in np.flatnonzero(samples.scores_prompt & first):
        scores = sequences[at].state.scores
        has_nonfinite[at] = scores is not None and scores.nonfinite
    return has_nonfinite


def _fork(
    scheduler: Scheduler,
    sampled: SampledRows,
    running: Bool,
    sequences: list[Sequence],
    ended: Bool,
) -> None:
    """Start all samples of a row except the first; they share the prompt's blocks."""
    forking = sampled.samples_per_row > 1
    if not forking.any():
        return
    scheduler.table.pending_forks[sampled.rows[running]] = 0
    forecast = scheduler.forecast()
    first = np.cumsum(sampled.samples_per_row) - sampled.samples_per_row
    for row, count in zip(
        first[forking].tolist(), sampled.samples_per_row[forking].tolist(), strict=True
    ):
        for at in range(row + 1, row + count):
            if not ended[at]:
                scheduler.fork(sequences[row], sequences[at], forecast)
