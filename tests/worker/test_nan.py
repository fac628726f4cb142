"""A row with NaN logits fails alone, whatever it shares with other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer import LLM, SamplingParams
from tests.engine.invariants import check_scheduler

PREFIX = list(range(20, 40))
POISON = 77  # a token whose embedding is NaN
GOOD = [[*PREFIX, 50, 51, 52], [*PREFIX, 53], [*PREFIX, *range(60, 69)]]
BAD = [*PREFIX, POISON]


def poisoned(model: Path, **engine: int) -> LLM:
    llm = LLM(str(model), num_kv_blocks=64, block_size=4, **engine)
    on_threads: Any = llm._context.engine._runner
    runner = on_threads._runner
    with torch.no_grad():
        weights = runner._model.get_input_embeddings().weight
        weights[POISON] = torch.nan
    return llm


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_num_batched_tokens", [8192, 7])
def test_rows_that_share_its_prefix_are_right(
    model: Path, n: int, max_num_batched_tokens: int
) -> None:
    params = SamplingParams(max_tokens=6, n=n, seed=1, ignore_eos=True)
    alone = [
        poisoned(model).generate([prompt], params, use_tqdm=False)[0].outputs for prompt in GOOD
    ]
    llm = poisoned(model, max_num_batched_tokens=max_num_batched_tokens)
    outputs = llm.generate([BAD, *GOOD, BAD], params, use_tqdm=False)
    for bad in (outputs[0], outputs[-1]):
        assert bad.error.code == "nan_logits"
    for output, samples in zip(outputs[1:-1], alone, strict=True):
        assert output.error is None
        assert [s.token_ids for s in output.outputs] == [s.token_ids for s in samples]
    check_scheduler(llm._context.engine.scheduler)
