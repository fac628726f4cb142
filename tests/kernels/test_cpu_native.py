"""The C kernels: equal to their twins, with bits that depend on nothing but a row's own context."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import reference
from batchinfer.kernels.cases import (
    ATTENTION_CASES,
    WRITE_CASES,
    AttentionCase,
    WriteCase,
    build_attention,
    build_write,
)
from batchinfer.kernels.cpu import library, native

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)

compiled = pytest.mark.skipif(library.load() is None, reason="no C compiler here")


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_equals_its_twin(case: AttentionCase, dtype: torch.dtype) -> None:
    inputs = build_attention(case, "cpu", dtype)
    got, expected = inputs.with_fresh_out(), inputs.with_fresh_out()
    for name in ("max_query_len", "max_context_len", "num_splits"):
        got.pop(name, None)  # launch hints of the GPU kernel
    native.paged_attention(**got)
    reference.paged_attention(**expected)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_write_equals_its_twin(case: WriteCase, dtype: torch.dtype) -> None:
    got, arguments = build_write(case, "cpu", dtype)
    native.kv_write(**arguments)
    expected, arguments = build_write(case, "cpu", dtype)
    reference.kv_write(**arguments)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(("window", "width"), [(0, 64), (0, 24), (37, 64)])
def test_a_token_has_the_same_bits_however_it_is_computed(
    dtype: torch.dtype, block_size: int, window: int, width: int
) -> None:
    """One pass over a prompt, chunks of any size, and one token at a time."""
    torch.manual_seed(0)
    length, num_heads, num_kv_heads = 300, 6, 2
    blocks = -(-length // block_size)
    pool = torch.randn(blocks, 2, num_kv_heads, block_size, width).to(dtype)
    query = torch.randn(length, num_heads, width).to(dtype)
    table = torch.randperm(blocks, dtype=torch.int32)[None]

    def attend(chunk: int) -> torch.Tensor:
        out = torch.empty_like(query)
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            native.paged_attention(
                query[start:stop],
                pool[:, 0],
                pool[:, 1],
                table,
                torch.tensor([0, stop - start], dtype=torch.int32),
                torch.tensor([stop], dtype=torch.int32),
                scale=0.2,
                out=out[start:stop],
                sliding_window=window,
            )
        return out

    whole = attend(length)
    for chunk in (1, 7, 64):
        assert torch.equal(attend(chunk), whole)


@compiled
def test_later_tokens_cannot_spoil_earlier_ones() -> None:
    """Not even with NaN in the same block."""
    pool = torch.randn(1, 2, 1, 16, 64)
    pool[:, :, :, 9:] = torch.nan
    query, out = torch.randn(12, 3, 64), torch.empty(12, 3, 64)
    starts, lens = torch.tensor([0, 12]).int(), torch.tensor([12]).int()
    table = torch.zeros(1, 1, dtype=torch.int32)
    native.paged_attention(query, pool[:, 0], pool[:, 1], table, starts, lens, scale=0.1, out=out)
    assert out[:9].isfinite().all()
    assert out[9:].isnan().all()
