"""Finishes samples and requests: frees their blocks, and makes completions or errors."""

from __future__ import annotations

from batchinfer.engine.request import Completion
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.sequence import RequestState, Sequence
from batchinfer.engine.step_io.failures import Failure
from batchinfer.protocols import StopMatch


def finish_sample(scheduler: Scheduler, sequence: Sequence, stop: int | StopMatch | None) -> None:
    """Free a finished sample's row and blocks and store its output."""
    state = sequence.state
    if sequence.row >= 0:
        scheduler.finish(sequence)
    state.samples.remove(sequence)
    reason = "length" if stop is None else "stop"
    if isinstance(stop, int):
        stop = state.request.named_stop(stop)
    state.finished[sequence.index] = sequence.output(reason, stop)


def fail_request(scheduler: Scheduler, state: RequestState, *, is_nan: bool) -> None:
    """Fail a request, or restart it if the blocks of another row may have caused the failure.

    The request's blocks are removed from the index. If the request used cached blocks, a NaN in
    them may have caused its NaN logits: attention spreads a NaN of one token over a whole tile. The
    request then restarts once, without cached blocks and with the same random numbers.
    """
    state.note_peak_blocks()
    used_cache = state.stats.cached_tokens > 0 or state.request.first_sample > 0
    restarts = is_nan and used_cache and not state.skip_prefix_cache
    for sample in state.samples:
        scheduler.drop(sample)
    state.samples.clear()
    if restarts:
        state.skip_prefix_cache = True
        leader = state.restart()
        leader.computed_once = state.request.num_prompt_tokens
        scheduler.requeue(leader)


def complete(state: RequestState, failure: Failure | None, now: float) -> Completion:
    """Return the completion of a request without unfinished samples."""
    outputs = [state.finished[index] for index in sorted(state.finished)]
    stats = state.stats
    assert state.admitted_at is not None
    assert state.first_token_at is not None
    if not state.request.pools:  # the output token of a pooling request is ignored
        stats.output_tokens = sum(len(output.token_ids) for output in outputs)
        stats.decode_ms = (now - state.first_token_at) * 1e3
    stats.queue_ms = (state.admitted_at - state.arrived_at) * 1e3
    stats.prefill_ms = (state.first_token_at - state.admitted_at) * 1e3
    stats.latency_ms = (now - state.arrived_at) * 1e3
    code, message = failure or (None, None)
    completion = Completion(state.request, outputs, code, message, stats)
    if state.scores is not None and failure is None:
        completion.prompt_logprobs = state.scores.logprobs()
    completion.hidden_state = None if failure else state.hidden_state
    return completion
