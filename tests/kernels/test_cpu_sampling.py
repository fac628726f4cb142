"""The C kernel draws the same tokens as the sampler's torch operations, for all filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.cpu import sampling
from batchinfer.worker.sampling.on_cpu import RANDOM_BITS
from batchinfer.worker.sampling.top_k_top_p import left_out

pytestmark = pytest.mark.skipif(not cpu_attention.supports(torch.float32), reason="no C compiler")


def drawn(
    logits: torch.Tensor,
    bits: list[int],
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> list[int]:
    """Return the tokens of samples that draw from one row."""
    out = torch.zeros(len(bits), dtype=torch.int64)
    sampling.draw(
        logits[None],
        logits.amax()[None],
        rows=torch.tensor([0]),
        temperature=torch.tensor([temperature]),
        min_p=torch.tensor([min_p]),
        top_p=torch.tensor([top_p]),
        top_k=torch.tensor([top_k], dtype=torch.int32),
        starts=torch.tensor([0, len(bits)]),
        bits=torch.tensor(bits),
        out=out,
    )
    return out.tolist()


def expected(
    logits: torch.Tensor,
    bits: list[int],
    temperature: float,
    min_p: float,
    top_p: float,
    top_k: int,
) -> tuple[list[int], list[int]]:
    """Return tokens drawn by torch, with slightly smaller and slightly larger random numbers."""
    relative = ((logits - logits.amax()) / temperature).exp()
    weights = torch.where(relative < min_p, 0.0, relative).mul(2.0**40).long()[None]
    removed = left_out(
        weights, logits[None], np.array([top_k], np.int32), np.array([top_p], np.float32)
    )
    weights[removed] = 0
    cumulative = weights[0].cumsum(0)
    total = int(cumulative[-1])
    places = [
        torch.tensor([total * u // 2**RANDOM_BITS + shift for u in bits]).clamp(0, total - 1)
        for shift in (-(total >> 20), total >> 20)
    ]
    low, high = (torch.searchsorted(cumulative, at, right=True).tolist() for at in places)
    return low, high


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 300, 1000, 5000]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    rounded=st.booleans(),
    temperature=st.sampled_from([0.05, 1.0, 3.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    top_p=st.sampled_from([0.01, 0.5, 0.99, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 50, 400, 6000]),
)
def test_cpu_draws_equal_torch(
    seed: int,
    vocab: int,
    scale: float,
    rounded: bool,
    temperature: float,
    min_p: float,
    top_p: float,
    top_k: int,
) -> None:
    """Results may differ in the last bit of ``exp``, so compare with neighboring random numbers."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator) * scale
    if rounded:
        logits = logits.round()  # many equally likely tokens
    bits = torch.randint(0, 2**RANDOM_BITS, (30,), generator=generator).tolist()
    got = drawn(logits, bits, temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k)
    low, high = expected(logits, bits, temperature, min_p, top_p, top_k)
    assert all(a <= token <= b for a, token, b in zip(low, got, high, strict=True))


def test_smallest_and_largest_random_numbers() -> None:
    logits = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf])
    assert drawn(logits, [0, 2**RANDOM_BITS - 1]) == [1, 2]
    assert drawn(logits, [0, 2**RANDOM_BITS - 1], top_k=3) == [1, 2]
    assert drawn(logits, [0, 2**RANDOM_BITS - 1], top_k=1) == [1, 1]


def test_row_without_finite_maximum_is_skipped() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        assert drawn(torch.tensor([value, value]), [5]) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """bfloat16 logits give the same tokens as equal float32 logits."""
    torch.manual_seed(0)
    logits = torch.randn(45, 700).to(dtype)
    rows = torch.randperm(45)[:40]
    bits = torch.randint(0, 2**RANDOM_BITS, (80,))
    out = torch.zeros(80, dtype=torch.int64)
    top_k, top_p = torch.arange(40, dtype=torch.int32), torch.linspace(0.1, 1.0, 40)
    sampling.draw(
        logits,
        logits.amax(1).float(),
        rows=rows,
        temperature=torch.ones(40),
        min_p=torch.zeros(40),
        top_p=top_p,
        top_k=top_k,
        starts=torch.arange(0, 82, 2),
        bits=bits,
        out=out,
    )
    for at, row in enumerate(rows.tolist()):
        pair = slice(2 * at, 2 * at + 2)
        alone = drawn(logits[row].float(), bits[pair].tolist(), top_p=float(top_p[at]), top_k=at)
        assert out[pair].tolist() == alone
