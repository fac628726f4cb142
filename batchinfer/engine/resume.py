"""Requests that go on from the output of an earlier run.

Such a request is in the place of one that was preempted to be recomputed: its prompt and its tokens
are computed again, and the next one is drawn. What follows from the tokens is made of them: the
state of its grammar, of its stop strings, what its penalties count; random numbers are keyed by
position.
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer.engine.beam_search import Hypothesis
from batchinfer.engine.request import PartialOutput, PartialSample, Request
from batchinfer.engine.sequence import RequestState, Sequence


def begin(
    request: Request, now: float, arrival: int, max_model_len: int
) -> tuple[RequestState, list[Sequence]]:
    """The state of a request that arrives, and the sequences of it to queue.

    There are none where the partial output it brings is all it asks for. One that brings a partial
    output which lacks something begins anew, and its state's request brings none.

    Args:
        now: the engine's clock, in seconds.
        arrival: number of requests that arrived before it.
        max_model_len: most tokens of a sequence.
    """
    state, partial = RequestState(request, now, arrival), request.partial_output
    if partial is None:
        return state, [state.restart()]
    if _is_whole(request, partial, max_model_len):
        state.reset()
        state.samples = [_sequence(state, sample) for sample in partial.samples]
        if all(map(_replay, state.samples)):
            return state, _go_on(state, partial)
    return begin(replace(request, partial_output=None), now, arrival, max_model_len)


def _go_on(state: RequestState, partial: PartialOutput) -> list[Sequence]:
    """Give a state the finished part of an output; the sequences that wait for themselves."""
    state.stats = replace(partial.stats)
    if state.search is None or not state.samples:
        state.finished = {output.index: output for output in partial.finished}
        return list(state.samples)
    for output in partial.finished:
        assert output.score is not None
        state.search.finished.append(
            Hypothesis(output.token_ids.tolist(), output.cumulative_logprob, output.score)
        )
    return state.samples[:1]  # the others of a group wait for its leader


def _is_whole(request: Request, partial: PartialOutput, max_model_len: int) -> bool:
    """Whether the samples are all there, with all that was asked for, and none is at its end."""
    params = request.params
    most = min(params.max_tokens, max_model_len - request.num_prompt_tokens)
    if not all(0 < len(sample.token_ids) < most for sample in partial.samples):
        return False
    if params.beam_width:
        return len({len(beam.token_ids) for beam in partial.samples}) == 1
    if not partial.samples and params.prompt_logprobs is not None:
        return False  # they come of computing the prompt
    if params.logprobs is not None and any(s.logprobs is None for s in partial.samples):
        return False
    indices = [sample.index for sample in partial.samples]
    indices += [output.index for output in partial.finished]
    first = request.first_sample
    return sorted(indices) == list(range(first, first + params.n))


def _sequence(state: RequestState, sample: PartialSample) -> Sequence:
    """A sample that waits, its tokens known and none of them computed."""
    sequence = Sequence(state, 0 if state.search is not None else sample.index)
    sequence.output_ids = sample.token_ids.tolist()
    sequence.cumulative_logprob = sample.cumulative_logprob
    if sequence.logprobs is not None:
        sequence.logprobs = list(sample.logprobs or ())
    sequence.computed_once = sequence.num_tokens - 1
    return sequence


def _replay(sequence: Sequence) -> bool:
    """Advance a sample's grammar and stop checker by its tokens; whether it may go on."""
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
