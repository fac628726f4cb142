"""Takes a step's result back: tokens to their sequences, forks, ends, completions."""

from __future__ import annotations

import numpy as np

from batchinfer.engine.request import Completion, TokenLogprobs
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.sequence import RequestState, Sequence
from batchinfer.engine.step import Bool, Int32, StepResult
from batchinfer.engine.table import Rows, SequenceTable
from batchinfer.protocols import StopMatch


def take_back(
    scheduler: Scheduler, rows: Rows, copies: Int32, result: StepResult, now: float
) -> list[Completion]:
    """Apply a step's samples.

    Args:
        scheduler: after the step's tokens count as computed.
        rows: [R] rows that samples were drawn for.
        copies: [R] samples drawn for each; over 1 where a row's samples part.
        result: K = sum of ``copies`` samples.
        now: the engine's clock, in seconds.

    Returns:
        Requests that are done.
    """
    table = scheduler.table
    drawn = np.repeat(rows, copies)
    sequences = _with_new_samples(table, rows, copies)
    for sequence, token, logprob in zip(
        sequences, result.token_ids.tolist(), result.logprobs.tolist(), strict=True
    ):
        sequence.output_ids.append(token)
        sequence.cumulative_logprob += logprob
    _note_logprobs(sequences, table.num_logprobs[drawn], result)
    leaders = np.cumsum(copies) - copies
    table.num_tokens[rows] += 1
    table.last_token[rows] = result.token_ids[leaders]
    failed = result.nonfinite
    stops = _stops(table, drawn, sequences, result)
    lengths = table.num_tokens[drawn] - table.num_prompt[drawn]
    stopped = np.zeros(len(drawn), dtype=np.bool_)
    stopped[list(stops)] = True
    scheduler.packing.lengths.observe(lengths, stopped)

    for at in np.flatnonzero(lengths == 1):
        state = sequences[at].state
        if state.first_token_at is None:
            state.first_token_at = now
    ends = stopped | (table.num_tokens[drawn] >= table.max_total[drawn])
    _fork(scheduler, rows, copies, sequences, ends | failed)
    states: dict[RequestState, None] = {}
    for at in np.flatnonzero(ends & ~failed):
        states[sequences[at].state] = None
        _finish(scheduler, sequences[at], stops.get(int(at)))
    errors = dict.fromkeys(sequences[at].state for at in np.flatnonzero(failed))
    states |= errors
    for state in errors:
        _give_up(scheduler, state)
    return [
        _completion(state, failed=state in errors, now=now) for state in states if not state.live
    ]


def _with_new_samples(table: SequenceTable, rows: Rows, copies: Int32) -> list[Sequence]:
    """[K] the sequence of each sample; a row's further samples come to be here."""
    leaders = [table.sequence(row) for row in rows.tolist()]
    if len(rows) == copies.sum():
        return leaders
    sequences = []
    for leader, count in zip(leaders, copies.tolist(), strict=True):
        sequences.append(leader)
        for index in range(1, count):
            sample = Sequence(leader.state, index)
            leader.state.live.append(sample)
            sequences.append(sample)
    return sequences


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


def _stops(
    table: SequenceTable, drawn: Rows, sequences: list[Sequence], result: StepResult
) -> dict[int, int | StopMatch]:
    """The samples that end by choice with this token: the stop token or stop string that did it."""
    tokens = result.token_ids
    lengths = table.num_tokens[drawn] - table.num_prompt[drawn]
    may_stop = lengths >= table.min_tokens[drawn]
    by_token = (table.stop_ids[drawn] == tokens[:, None]).any(axis=1) & may_stop
    stops: dict[int, int | StopMatch] = {
        at: int(tokens[at]) for at in np.flatnonzero(by_token).tolist()
    }
    for at in np.flatnonzero(table.checks_stops[drawn] & ~by_token & ~result.nonfinite).tolist():
        checker = sequences[at].stop_checker
        assert checker is not None
        stop = checker.on_token(int(tokens[at]), may_stop=bool(may_stop[at]))
        if stop is not None:
            stops[at] = stop
    return stops


def _fork(
    scheduler: Scheduler, rows: Rows, copies: Int32, sequences: list[Sequence], gone: Bool
) -> None:
    """Run the new samples of rows that have several, sharing the prompt's blocks."""
    if not (copies > 1).any():
        return
    scheduler.table.unborn[rows] = 0
    forecast = scheduler.packing.forecast()
    first = np.cumsum(copies) - copies
    for row, count in zip(first[copies > 1].tolist(), copies[copies > 1].tolist(), strict=True):
        for at in range(row + 1, row + count):
            if not gone[at]:
                scheduler.fork(sequences[row], sequences[at], forecast)


def _finish(scheduler: Scheduler, sequence: Sequence, stop: int | StopMatch | None) -> None:
    """Give back what a finished sample holds and keep its output."""
    state = sequence.state
    if sequence.row >= 0:
        scheduler.finish(sequence)
    state.live.remove(sequence)
    reason = "length" if stop is None else "stop"
    request = state.request
    by_eos = stop in request.eos_token_ids and not request.params.ignore_eos
    if isinstance(stop, int) and by_eos:
        stop = None  # as vLLM: only a stop token that the user named is a reason
    state.finished[sequence.index] = sequence.output(reason, stop)


def _give_up(scheduler: Scheduler, state: RequestState) -> None:
    """Stop a row whose logits are not numbers.

    What it computed must not be found again. If it used blocks that another row computed, those
    may be to blame (a NaN that one token causes spreads to the whole tile it is attended in), so
    the row starts over and computes everything itself; its random numbers are the same.
    """
    state.note_peak_blocks()
    joined = state.stats.cached_tokens > 0 and not state.computes_alone
    for sample in state.live:
        if sample.row >= 0:
            scheduler.drop(sample)
        elif sample in scheduler.waiting:  # not there if it was drawn in this very step
            scheduler.waiting.remove(sample)
    state.live.clear()
    if joined:
        state.computes_alone = True
        state.finished.clear()
        leader = Sequence(state, 0)
        leader.computed_once = state.request.num_prompt_tokens
        state.live.append(leader)
        scheduler.requeue(leader)


def _completion(state: RequestState, *, failed: bool, now: float) -> Completion:
    outputs = [state.finished[index] for index in sorted(state.finished)]
    stats = state.stats
    assert state.admitted_at is not None
    assert state.first_token_at is not None
    stats.output_tokens = sum(len(output.token_ids) for output in outputs)
    stats.queue_ms = (state.admitted_at - state.arrived_at) * 1e3
    stats.prefill_ms = (state.first_token_at - state.admitted_at) * 1e3
    stats.decode_ms = (now - state.first_token_at) * 1e3
    stats.latency_ms = (now - state.arrived_at) * 1e3
    completion = Completion(state.request, outputs, stats=stats)
    if failed:
        completion.error_code = "nan_logits"
        completion.error_message = "the logits hold NaN or infinity, or bans leave no token"
    return completion
