"""Pools with more than 2^31 elements, in which only the blocks in use have memory."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest
import torch

from batchinfer.kernels import attention_loop, decode_attention, reference
from batchinfer.kernels.batch_invariant_attention import batch_invariant_attention
from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.kv_write import kv_write
from tests.kernels.batch_invariant_cases import batch_invariant_arguments
from tests.kernels.cases import AttentionCase, attend_paged, build_attention, reference_attention

SLOT_ELEMENTS = 2**30
MARGIN = 2**33  # bytes before and after the pool, where overflowing offsets end up
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python defines from 3.13 on
CASE = AttentionCase(
    "far_apart", ((1, 40), (9, 21), (1, 17)), num_heads=4, num_kv_heads=2, key_width=16
)


def far_apart(arguments: dict[str, Any], pool: torch.Tensor) -> dict[str, Any]:
    """Copy the blocks to a pool in which they are 2^30 elements apart."""
    room = 2 * MARGIN + len(pool) * SLOT_ELEMENTS * pool.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, room, flags=flags), dtype=pool.dtype)
    start = MARGIN // pool.element_size()
    large = memory.as_strided(pool.shape, (SLOT_ELEMENTS, 1), start)
    large.copy_(pool)
    moved = {}
    for name in ("key_cache", "value_cache"):
        cache = arguments[name]
        strides = (SLOT_ELEMENTS, *cache.stride()[1:])
        moved[name] = memory.as_strided(cache.shape, strides, start + cache.storage_offset())
    return arguments | moved


@pytest.mark.skipif(sys.platform != "linux", reason="maps more memory than the machine has")
@pytest.mark.parametrize("rows_are_int64", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("kind", ["model", "float8", "split"])
def test_kv_write_and_attention_use_int64_offsets(
    kind: str, rows_are_int64: bool, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows_are_int64:
        monkeypatch.setattr(attention_loop, "_INT32_ROWS", 0)
    monkeypatch.setattr(decode_attention, "multiplies_float8", lambda *_, **__: kind == "split")
    cache_dtype = None if kind == "model" else FP8
    inputs = build_attention(CASE, interpreter, torch.float16, cache_dtype)
    # Two float8 numbers can hold a bfloat16 number exactly.
    inputs.arguments["query"].copy_(inputs.arguments["query"].bfloat16())
    arguments = far_apart(inputs.arguments, inputs.pool)
    assert len(inputs.pool) * SLOT_ELEMENTS > 2**32
    rows, slots = torch.randn(2, 3, 2, 16).half(), arguments["block_tables"][[0, 1, 2], [2, 1, 1]]
    mapping = slots.long() * 16 + torch.tensor([7, 4, 0])  # the last token of each sequence
    for write, caches in ((kv_write, arguments), (reference.kv_write, inputs.arguments)):
        write(*rows, caches["key_cache"], caches["value_cache"], mapping)
    expected = inputs.with_fresh_out()
    reference_attention(**expected)
    for attend, given in (
        (attend_paged, arguments),
        (batch_invariant_attention, batch_invariant_arguments(arguments)),
    ):
        given["out"] = torch.full_like(expected["out"], torch.nan)
        attend(**given)
        torch.testing.assert_close(given["out"], expected["out"], atol=2e-3, rtol=2e-3)
