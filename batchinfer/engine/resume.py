"""Starts requests that continue from the output of an earlier run.

The engine treats such a request like a preempted request: it computes the prompt and the known
output tokens again, then draws the next token. Grammars, stop strings and penalties rebuild their
state from the tokens. The next tokens are the same as without the interruption, because random
numbers depend only on the seed and the position.
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer.engine.request import PartialOutput, PartialSample, Request
from batchinfer.engine.sequence import RequestState, Sequence


def begin(
    request: Request, now: float, arrival: int, max_model_len: int
) -> tuple[RequestState, list[Sequence]]:
    """Return the state of an arriving request, and its sequences for the queue.

    If all samples of the partial output are finished, no sequence is queued. The request ignores
    the partial output and restarts if the output lacks a sample or value that the request needs, or
    if a grammar or stop string rules out its tokens.

    Args:
        now: the engine's clock, in seconds.
        arrival: number of requests that arrived before this request.
    """
    state, partial = RequestState(request, now, arrival), request.partial_output
    if partial is None:
        return state, [state.restart()]
    if _is_whole(request, partial, max_model_len):
        state.reset()
        state.samples = [_sequence(state, sample) for sample in partial.samples]
        if all(map(_replay, state.samples)):
            return state, _continue(state, partial)
    return begin(replace(request, partial_output=None), now, arrival, max_model_len)


def _continue(state: RequestState, partial: PartialOutput) -> list[Sequence]:
    """Restore the finished part of an output; return the sequences for the queue."""
    state.stats = replace(partial.stats)
    if state.search is None or not state.samples:
        state.finished = {output.index: output for output in partial.finished}
        return list(state.samples)
    state.search.finished = list(partial.finished)
    return state.samples[:1]  # the first sequence represents the group in the queue


def _is_whole(request: Request, partial: PartialOutput, max_model_len: int) -> bool:
    """Return true if a partial output has all samples and values, and every unfinished sample has
    at least one token and room for another token."""
    params = request.params
    most = min(params.max_tokens, max_model_len - request.num_prompt_tokens)
    if not all(0 < len(sample.token_ids) < most for sample in partial.samples):
        return False
    if params.logprobs is not None and any(s.logprobs is None for s in partial.samples):
        return False
    if params.beam_width:
        return len({len(beam.token_ids) for beam in partial.samples}) == 1
    if not partial.samples and params.prompt_logprobs is not None:
        return False  # scoring the prompt needs a running sample
    indices = [sample.index for sample in partial.samples]
    indices += [output.index for output in partial.finished]
    first = request.first_sample
    return sorted(indices) == list(range(first, first + params.n))


def _sequence(state: RequestState, sample: PartialSample) -> Sequence:
    """Make a waiting sequence with the tokens of a partial sample. No token is computed yet."""
    sequence = Sequence(state, 0 if state.search is not None else sample.index)
    sequence.output_ids = sample.token_ids.tolist()
    sequence.cumulative_logprob = sample.cumulative_logprob
    if sequence.logprobs is not None:
        sequence.logprobs = list(sample.logprobs or ())
    sequence.computed_once = sequence.num_tokens - 1
    return sequence


def _replay(sequence: Sequence) -> bool:
    """Advance a sample's grammar and stop checker by its tokens; return true if it may continue."""
    state, checker = sequence.grammar_state, sequence.stop_checker
    if state is not None:
        state.replay(sequence.output_ids)
        if state.error is not None:
            return False
    if checker is None:
        return True
    least = sequence.request.params.min_tokens
    return not any(
        checker.on_token(token, may_stop=length >= least)
        for length, token in enumerate(sequence.output_ids, start=1)
    )
