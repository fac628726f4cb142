"""What a job's steps draw by is compiled before its first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from batchinfer.config import SamplingParams
from batchinfer.engine.step import SamplingBatch
from batchinfer.worker.sampling.kinds import batch_kinds
from batchinfer.worker.sampling.on_device import draw_on_device
from tests.engine.fake import make_engine, make_request, run_all
from tests.engine.toy_grammar import Toy, constrained

VOCAB = 1024
FILTERED = {"_sample_kernel", "_sample_rest_kernel"}
EDITED = {"_sample_kernel", "_edit_logits_kernel"}

Variant = tuple[Any, ...]
"""A kernel, and of its arguments what it is compiled for: types of tensors, and all else."""


class Compiled:
    """Notes what launches would be compiled for, and launches nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._variants: set[Variant] = set()
        monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **named: self._note(*args))

    def _note(self, kernel: Any, *arguments: Any) -> None:
        told = (one.dtype if isinstance(one, torch.Tensor) else one for one in arguments)
        self._variants.add((kernel.fn.__name__, *told))

    def drawing(self, batch: SamplingBatch, num_rows: int = 1) -> set[Variant]:
        self._variants = set()
        draw_on_device(torch.zeros(num_rows, VOCAB), batch)
        return self._variants


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
        ({"structured_outputs": {"regex": "a*"}}, {"_sample_kernel", "_forbid_masked_kernel"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_no_step_is_of_another_kind(
    params: dict[str, Any], kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(1, [7, 8, 9], max_tokens=6, **params)
    if "bad_words" in params:
        request = replace(request, bad_words_token_ids=((4,), (5, 6)))
    if "structured_outputs" in params:
        request = constrained(request, Toy())
    engine, runner = make_engine(32)
    run_all(engine, [request, replace(request, row_id=2)])

    compiled = Compiled(monkeypatch)
    ahead = set[Variant]()
    for batch in batch_kinds(SamplingParams(**params), VOCAB):
        ahead |= compiled.drawing(batch)
    assert {name for name, *_ in ahead} == kernels
    for step in runner.steps:
        if step.num_samples:
            assert compiled.drawing(step.sampling, len(step.logits_indices)) <= ahead
