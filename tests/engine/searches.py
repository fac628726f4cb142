"""A simple beam search over the candidates of ``FakeRunner``, to compare the engine with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from batchinfer.engine.request import Completion, Request
from tests.engine.fake import BEAM_VOCAB, candidates, make_request
from tests.engine.toy_grammar import Toy

Found = list[tuple[list[int], float]]


@dataclass(frozen=True)
class SmallToy(Toy):
    """A grammar over the tokens that beams choose from."""

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        return sorted({token % BEAM_VOCAB for token in super().allowed(tokens)})


def expected_beams(request: Request, max_model_len: int = 4096, window: int = 0) -> Found:
    """Consider every token of every beam, and keep as many candidates as transformers does."""
    params, prompt = request.params, request.prompt_token_ids.tolist()
    width, grammar = params.beam_width, request.grammar
    assert width is not None
    assert grammar is None or isinstance(grammar, Toy)
    limit = min(params.max_tokens, max_model_len - len(prompt))
    beams, finished = [([], 0.0)], []
    for length in range(1, limit + 1):
        longer = [
            ([*tokens, token], total + float(logprob))
            for tokens, total in beams
            for token, logprob in candidates(
                np.asarray((prompt + tokens)[-window:], np.int32).tobytes()
            )
            if grammar is None or token in grammar.allowed(tokens)
        ]
        longer = sorted(longer, key=lambda beam: -beam[1])[: request.num_beam_candidates]
        ends = [length == limit or _stops(request, tokens) for tokens, _ in longer]
        scored = [(tokens, total / length**params.length_penalty) for tokens, total in longer]
        finished += [beam for beam, end in zip(scored[:width], ends[:width], strict=True) if end]
        finished = sorted(finished, key=lambda beam: -beam[1])[:width]
        beams = [beam for beam, end in zip(longer, ends, strict=True) if not end][:width]
        if not beams or (
            len(finished) == width
            and beams[0][1] / length**params.length_penalty <= finished[-1][1]
        ):
            break
    return finished[: params.n]


def _stops(request: Request, tokens: list[int]) -> bool:
    """Return true if a stop token or the stop checker ends a beam with its last token."""
    if tokens[-1] in request.beam_end_ids or request.make_stop_checker is None:
        return tokens[-1] in request.beam_end_ids
    checker = request.make_stop_checker()
    found = [checker.on_token(token, may_stop=True) for token in tokens]
    return found[-1] is not None


def assert_found(completion: Completion, max_model_len: int = 4096, window: int = 0) -> None:
    """Assert that the completion has the expected beams."""
    assert completion.error_code is None
    best = expected_beams(completion.request, max_model_len, window)
    assert [output.token_ids.tolist() for output in completion.outputs] == [ids for ids, _ in best]
    for output, (token_ids, score) in zip(completion.outputs, best, strict=True):
        assert output.score == pytest.approx(score)
        stopped = _stops(completion.request, token_ids)
        assert output.finish_reason == ("stop" if stopped else "length")


def beams(row_id: int, prompt: list[int], width: int, **params: object) -> Request:
    """Return a request for all beams of a search."""
    return make_request(row_id, prompt, **{"n": width, "beam_width": width, **params})
