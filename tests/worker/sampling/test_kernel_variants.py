"""All variants of sampling kernels that a job needs are compiled before its first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchinfer.builders import engine as build
from batchinfer.config import SCORING, SamplingParams, field_names
from batchinfer.engine.step import SamplingBatch
from tests.engine.fake import make_request
from tests.engine.toy_grammar import Toy, constrained
from tests.worker.sampling.compiled import VOCAB, Compiled

FILTERED = {"_sample_kernel", "_sample_rest_kernel"}
EDITED = {"_sample_kernel", "_penalties_kernel"}


@pytest.mark.parametrize(
    ("params", "kernels"),
    [
        ({"temperature": 0.0}, {"_sample_kernel"}),
        ({"logprobs": 3}, {"_sample_kernel"}),
        ({"top_k": 20}, FILTERED),
        ({"top_p": 0.9, "temperature": 0.0}, {"_sample_kernel"}),
        ({"min_tokens": 3, "top_p": 0.9}, EDITED | FILTERED),
        ({"presence_penalty": 1.0}, EDITED),
        ({"logit_bias": {5: 2.0}, "temperature": 0.0}, EDITED),
        ({"allowed_token_ids": (4, 5, 6), "n": 2}, EDITED),
        ({"bad_words": ("x",)}, EDITED),
        ({"structured_outputs": {"regex": "a*"}}, {"_sample_kernel", "_token_bitmask_kernel"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_no_step_launches_another_variant(
    params: dict[str, Any], kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(1, [7, 8, 9], max_tokens=6, **params)
    if "bad_words" in params:
        request = replace(request, bad_words_token_ids=((4,), (5, 6)))
    if "structured_outputs" in params:
        request = constrained(request, Toy())
    compiled = Compiled(monkeypatch)
    ahead = compiled.ahead(SamplingParams(**params))
    assert {name for name, *_ in ahead} == kernels
    assert compiled.in_steps([request, replace(request, row_id=2)]) <= ahead


ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {5: 2.0}},
    {"repetition_penalty": 1.2, "top_k": 20},
    {"min_tokens": 3},
]


def test_no_step_of_mixed_samples_launches_another_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [make_request(at, [7, 8], max_tokens=6, **row) for at, row in enumerate(ROWS)]
    compiled = Compiled(monkeypatch)
    in_steps = compiled.in_steps(requests)
    assert in_steps <= compiled.ahead(*[request.params for request in requests])
    rows_own = {"own": field_names(SamplingParams)}
    ahead = compiled.ahead(SamplingParams(), **rows_own)
    assert in_steps <= ahead
    assert "_token_bitmask_kernel" in {name for name, *_ in ahead}  # for a row's own grammar
    assert in_steps <= compiled.ahead(SamplingParams(top_k=5, presence_penalty=1.0), **rows_own)


def test_tokens_that_are_given_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(make_request(1, [7, 8]), params=SCORING, given_token=9)
    compiled = Compiled(monkeypatch)
    assert compiled.in_steps([request]) == compiled.ahead(SCORING, forced_tokens=True)


def test_variants_are_compiled_once_and_prompt_scores_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[SamplingBatch] = []
    judged: list[int] = []

    class Handle:
        def result(self) -> None:
            pass

    def draw(logits: torch.Tensor, batch: SamplingBatch) -> Handle:
        drawn.append(batch)
        return Handle()

    monkeypatch.setattr(build, "Sampler", lambda: draw)
    monkeypatch.setattr(build, "row_stats", lambda logits, *_, **__: judged.append(len(logits)))
    warm_up = build._SamplingKernels(lambda: torch.zeros(1, VOCAB))
    warm_up([SamplingParams(top_p=0.9)])
    warm_up([SamplingParams(top_p=0.8), SamplingParams(top_p=0.7)])
    assert (len(drawn), judged) == (1, [])
    warm_up([SCORING], forced_tokens=True)
    assert (len(drawn), judged) == (2, [1])
