"""Samplers draw only tokens that grammars allow; rows without a grammar keep their bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.step import Int32
from batchinfer.worker.sampling.logits_processors import forbid_masked
from batchinfer.worker.sampling.sampler import Sampler
from tests.worker.sampling.sampling_batches import Sample, make_batch


def pack(allowed: np.ndarray) -> Int32:
    """Pack bools [M, tokens] into masks."""
    wide = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(wide, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(st.integers(1, 200), st.integers(0, 70), st.sets(st.integers(0, 8)))
def test_forbidden_logits_are_minus_infinity(
    dtype: torch.dtype, vocab: int, beyond: int, rows: set[int]
) -> None:
    """torch masks float16 logits; without a C compiler, it masks logits of all dtypes."""
    random = np.random.default_rng(vocab)
    allowed = random.random((len(rows), max(vocab + beyond - 35, 1))) < 0.3
    wider = torch.from_numpy(random.normal(size=(9, vocab + 3))).to(dtype)
    logits = wider[:, :vocab]
    expected = logits.clone()
    for mask, row in zip(allowed, sorted(rows), strict=True):
        for token in range(vocab):
            if token >= len(mask) or not mask[token]:
                expected[row, token] = -torch.inf
    forbid_masked(logits, np.array(sorted(rows), dtype=np.int32), pack(allowed))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_samples_are_drawn_among_allowed_tokens(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 300).to(dtype)
    allowed = np.random.default_rng(0).random((3, 300)) < 0.05
    samples = [
        Sample(row=row, temperature=temperature, stream=row, index=index, logprobs=3)
        for row in range(6)
        for index in range(40)
    ]
    free = make_batch(samples)
    limited = replace(free, masked_rows=np.array([0, 2, 5], np.int32), masks=pack(allowed))
    plain, masked = (Sampler()(logits.clone(), batch).result() for batch in (free, limited))
    places = {0: 0, 2: 1, 5: 2}
    for k, sample in enumerate(samples):
        if sample.row in places:
            mask = allowed[places[sample.row]]
            assert mask[masked.token_ids[k]]
            among = logits[sample.row].float()[torch.from_numpy(mask)].log_softmax(0)
            at = int(mask[: masked.token_ids[k]].sum())
            assert masked.logprobs[k] == pytest.approx(float(among[at]), abs=1e-5)
        else:
            assert masked.token_ids[k] == plain.token_ids[k]
            assert masked.logprobs[k] == plain.logprobs[k]
    assert not masked.nonfinite.any()


def test_a_mask_without_tokens_fails_only_its_row() -> None:
    batch = make_batch([Sample(row=0), Sample(row=1)])
    masks = np.zeros((1, 1), dtype=np.int32)
    batch = replace(batch, masked_rows=np.array([1], np.int32), masks=masks)
    result = Sampler()(torch.randn(2, 20), batch).result()
    assert result.nonfinite.tolist() == [False, True]
