"""A step's result: tokens to their sequences, stops, forks, completions.

The step after it may be under way already. A sequence that ends by choice is seen one step late
then: it gives up its row and blocks here, which no step submitted so far is given (see ``Runner``),
and the token that the step under way draws for it is dropped when that step is taken back.
"""

from __future__ import annotations

import numpy as np

from batchinfer.engine.request import Completion, TokenLogprobs
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.sequence import RequestState, Sequence
from batchinfer.engine.step import Bool, Int32, StepResult
from batchinfer.engine.step_io.beam_step import process_beams
from batchinfer.engine.step_io.in_flight import InFlight, SampledRows
from batchinfer.engine.step_io.scored_prompts import process_scores
from batchinfer.engine.step_io.structured_output import StopResult, add_forced_tokens
from batchinfer.protocols import StopMatch

Failure = tuple[str, str]
"""Error code and message of a row."""

_NAN: Failure = ("nan_logits", "the logits hold NaN or infinity, or bans leave no token")


def find_stops(
    table: SequenceTable, samples: SampledRows, sequences: list[Sequence], result: StepResult
) -> StopResult:
    """Which of K samples end, with the token drawn or with one that it forces.

    Args:
        table: the running sequences.
        samples: [K] what they were drawn for.
        sequences: [K] these, with the tokens drawn; gets those that are forced.
        result: the tokens.
    """
    ends = StopResult(
        _stops(samples, sequences, result), samples.at_limit.copy(), samples.lengths.copy()
    )
    if samples.has_grammar.any():
        add_forced_tokens(table, samples, sequences, result, ends)
    return ends


def _stops(
    samples: SampledRows, sequences: list[Sequence], result: StepResult
) -> dict[int, int | StopMatch]:
    """The samples that end by choice with this token: the stop token or stop string that did it."""
    tokens, may_stop = result.token_ids, samples.may_stop
    by_token = (samples.stop_ids == tokens[:, None]).any(axis=1) & may_stop
    stops: dict[int, int | StopMatch] = {
        at: int(tokens[at]) for at in np.flatnonzero(by_token).tolist()
    }
    for at in np.flatnonzero(samples.checks_stops & ~by_token & ~result.nonfinite).tolist():
        checker = sequences[at].stop_checker
        assert checker is not None
        stop = checker.on_token(int(tokens[at]), may_stop=bool(may_stop[at]))
        if stop is not None:
            stops[at] = stop
    return stops


def process_result(
    scheduler: Scheduler, step: InFlight, result: StepResult, now: float
) -> list[Completion]:
    """Apply the oldest submitted step's result.

    Args:
        scheduler: after the step was submitted, and perhaps the one after it.
        step: what it drew samples for; K = sum of ``samples_per_row``.
        result: the K samples, and what is told of prompts.
        now: the engine's clock, in seconds.

    Returns:
        Requests that are done.
    """
    scheduler.pool.confirm()
    process_scores(step.scored, result.scored)
    drawn, result, running = _without_ended(scheduler.table, step.sampled, result)
    states: dict[RequestState, None] = {}
    errors: dict[RequestState, Failure] = {}
    beams = drawn.is_beam
    if beams.any():
        of_beams = result.only(np.repeat(beams, drawn.samples_per_row))
        states, failed_beams = process_beams(scheduler, drawn.only(beams), of_beams, now)
        errors = dict.fromkeys(failed_beams, _NAN)
        result = result.only(np.repeat(~beams, drawn.samples_per_row))
        drawn, running = drawn.only(~beams), running[~beams]
    sequences = _with_new_samples(drawn)
    for sequence, token, logprob in zip(
        sequences, result.token_ids.tolist(), result.logprobs.tolist(), strict=True
    ):
        sequence.output_ids.append(token)
        sequence.cumulative_logprob += logprob
    _note_last_tokens(scheduler.table, drawn, running, result)
    samples = drawn
    if len(sequences) > len(drawn.rows):
        samples = drawn.only(np.repeat(np.arange(len(drawn.rows)), drawn.samples_per_row))
    _note_logprobs(sequences, samples.num_logprobs, result)
    ends = find_stops(scheduler.table, samples, sequences, result)
    failed = result.nonfinite | _prompt_has_nan(samples, sequences)
    failed[list(ends.broken)] = True
    stopped = np.zeros(len(sequences), dtype=np.bool_)
    stopped[list(ends.stops)] = True
    scheduler.output_lengths.observe(ends.lengths, stopped)

    for at in np.flatnonzero(samples.lengths == 1):
        state = sequences[at].state
        if state.first_token_at is None:
            state.first_token_at = now
    ended = stopped | ends.at_limit
    _fork(scheduler, drawn, running, sequences, ended | failed)
    for at in np.flatnonzero(ended & ~failed):
        states[sequences[at].state] = None
        _finish(scheduler, sequences[at], ends.stops.get(int(at)))
    for which in np.flatnonzero(failed).tolist():
        problem = ends.broken.get(which)
        failure = _NAN if problem is None else ("invalid_structured_output", problem)
        errors[sequences[which].state] = failure
    states |= dict.fromkeys(errors)
    for state, failure in errors.items():
        _fail_request(scheduler, state, may_be_others=failure is _NAN)
    return [_completion(state, errors.get(state), now) for state in states if not state.samples]


def _without_ended(
    table: SequenceTable, drawn: SampledRows, result: StepResult
) -> tuple[SampledRows, StepResult, Bool]:
    """Leave out samples of sequences that ended before the step was read.

    Returns:
        What is left, and which of the R sequences left are in their rows: all but those whose
        end by length was known.
    """
    running = table.active[drawn.rows] & (table.admission[drawn.rows] == drawn.admission)
    alive = running.copy()
    for at in np.flatnonzero(~running):
        sequence = drawn.sequences[at]
        alive[at] = sequence in sequence.state.samples
    if alive.all():
        return drawn, result, running
    kept = np.repeat(alive, drawn.samples_per_row)
    return drawn.only(alive), result.only(kept), running[alive]


def _with_new_samples(drawn: SampledRows) -> list[Sequence]:
    """[K] the sequence of each sample; a row's further samples come to be here."""
    leaders: list[Sequence] = drawn.sequences.tolist()
    if len(leaders) == drawn.samples_per_row.sum():
        return leaders
    sequences = []
    for leader, count in zip(leaders, drawn.samples_per_row.tolist(), strict=True):
        sequences.append(leader)
        for index in range(1, count):
            sample = Sequence(leader.state, leader.index + index)
            leader.state.samples.append(sample)
            sequences.append(sample)
    return sequences


def _note_last_tokens(
    table: SequenceTable, drawn: SampledRows, running: Bool, result: StepResult
) -> None:
    """Tell the table what is known now: the last token of rows that no later step has sampled."""
    last = running & (table.num_tokens[drawn.rows] == drawn.num_tokens)
    rows, first = drawn.rows[last], np.cumsum(drawn.samples_per_row) - drawn.samples_per_row
    table.last_token[rows] = result.token_ids[first[last]]
    table.sample_at[rows] = -1


def _note_logprobs(sequences: list[Sequence], wanted: Int32, result: StepResult) -> None:
    """Keep log-probabilities for the sequences that asked for them."""
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
        logprobs = sequences[at].logprobs
        assert logprobs is not None
        logprobs.append(
            TokenLogprobs(
                token_id=int(result.token_ids[at]),
                logprob=float(result.logprobs[at]),
                rank=int(result.ranks[at]),
                top=tuple(top),
            )
        )


def _prompt_has_nan(samples: SampledRows, sequences: list[Sequence]) -> Bool:
    """[K] whether logits of the prompt, which are all known by its first sample, held NaN."""
    spoilt = np.zeros(len(sequences), dtype=np.bool_)
    for at in np.flatnonzero(samples.scores_prompt & (samples.lengths == 1)):
        scores = sequences[at].state.scores
        spoilt[at] = scores is not None and scores.nonfinite
    return spoilt


def _fork(
    scheduler: Scheduler, drawn: SampledRows, running: Bool, sequences: list[Sequence], gone: Bool
) -> None:
    """Run the new samples of rows that have several, sharing the prompt's blocks."""
    parting = drawn.samples_per_row > 1
    if not parting.any():
        return
    scheduler.table.pending_forks[drawn.rows[running]] = 0
    forecast = scheduler.forecast()
    first = np.cumsum(drawn.samples_per_row) - drawn.samples_per_row
    for row, count in zip(
        first[parting].tolist(), drawn.samples_per_row[parting].tolist(), strict=True
    ):
        for at in range(row + 1, row + count):
            if not gone[at]:
                scheduler.fork(sequences[row], sequences[at], forecast)


def _finish(scheduler: Scheduler, sequence: Sequence, stop: int | StopMatch | None) -> None:
    """Give back what a finished sample holds and keep its output."""
    state = sequence.state
    if sequence.row >= 0:
        scheduler.finish(sequence)
    state.samples.remove(sequence)
    reason = "length" if stop is None else "stop"
    if isinstance(stop, int):
        stop = state.request.named_stop(stop)
    state.finished[sequence.index] = sequence.output(reason, stop)


def _fail_request(scheduler: Scheduler, state: RequestState, *, may_be_others: bool) -> None:
    """Stop a row that failed.

    What it computed must not be found again. If its logits are not numbers and it used blocks that
    another row computed, those may be to blame (a NaN that one token causes spreads to the whole
    tile it is attended in), so the row starts over and computes everything itself; its random
    numbers are the same.
    """
    state.note_peak_blocks()
    joined = may_be_others and state.stats.cached_tokens > 0 and not state.skip_prefix_cache
    for sample in state.samples:
        scheduler.drop(sample)
    state.samples.clear()
    if joined:
        state.skip_prefix_cache = True
        leader = state.restart()
        leader.computed_once = state.request.num_prompt_tokens
        scheduler.requeue(leader)


def _completion(state: RequestState, failure: Failure | None, now: float) -> Completion:
    outputs = [state.finished[index] for index in sorted(state.finished)]
    stats = state.stats
    assert state.admitted_at is not None
    assert state.first_token_at is not None
    stats.output_tokens = sum(len(output.token_ids) for output in outputs)
    stats.queue_ms = (state.admitted_at - state.arrived_at) * 1e3
    stats.prefill_ms = (state.first_token_at - state.admitted_at) * 1e3
    stats.decode_ms = (now - state.first_token_at) * 1e3
    stats.latency_ms = (now - state.arrived_at) * 1e3
    code, message = failure or (None, None)
    completion = Completion(state.request, outputs, code, message, stats)
    if state.scores is not None and failure is None:
        completion.prompt_logprobs = state.scores.logprobs()
    return completion
