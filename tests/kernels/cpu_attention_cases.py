"""Inputs and checks of the C kernels' attention, including float8 caches and latents (MLA)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from batchinfer.kernels import reference
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from tests.kernels.cases import (
    ATTENTION_CASES,
    AttentionCase,
    build_attention,
    reference_attention,
    without_launch_options,
)
from tests.kernels.mla_cases import INTERPRETED_MLA_CASES, MLACase, build_mla, mla_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}

_ODD_WIDTHS = AttentionCase(
    "odd_widths", ((7, 30), (1, 57), (64, 64)), key_width=13, value_width=11, sliding_window=20
)
ODD_CASES = (_ODD_WIDTHS, replace(_ODD_WIDTHS, name="odd_widths_and_blocks", block_size=3))


def _on_a_cpu(case: AttentionCase) -> AttentionCase:
    """Return the case without GPU launch options, and with few narrow heads if it is large."""
    case = replace(case, num_splits=None)
    return replace(case, num_heads=4, num_kv_heads=2, key_width=40) if len(case.lens) > 50 else case


CPU_CASES = tuple(
    {replace(case, name=""): case for case in map(_on_a_cpu, ATTENTION_CASES)}.values()
)
CASES = (*CPU_CASES, *ODD_CASES)
_MIXED = INTERPRETED_MLA_CASES[0]
MLA_CASES = (
    *(case for case in INTERPRETED_MLA_CASES if case.num_splits is None),
    replace(_MIXED, name="odd_widths", rank=13, rotary=6),
    replace(_MIXED, name="odd_blocks", block_size=3),
    replace(_MIXED, name="deepseek", num_heads=16, rank=512, rotary=64),
)


def store(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Convert caches [slot, Hkv, block_size, width] in place to the layout of the C kernels."""
    rows = [cache.transpose(1, 2).flatten(0, 1).clone() for cache in (keys, values)]
    cpu_attention.kv_write(*rows, keys, values, torch.arange(len(rows[0])))


def check_attention_over_fp8(case: AttentionCase, dtype: torch.dtype) -> None:
    """Compare attention to a float8 pool with its reference."""
    got, expected = (build_attention(case, "cpu", dtype).with_fresh_out() for _ in range(2))
    for inputs in (got, expected):
        for name in ("key_cache", "value_cache"):
            inputs[name] = reference.stored(inputs[name], torch.float8_e4m3fn)
    got["key_cache"] = got["key_cache"].mT.contiguous().mT
    cpu_attention.paged_attention(**without_launch_options(got))
    reference_attention(**expected)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)


def check_attention(case: AttentionCase, dtype: torch.dtype, kernel: int | None = None) -> None:
    """Compare attention, and the keys and values that are read back, with their references."""
    got, expected = (build_attention(case, "cpu", dtype).with_fresh_out() for _ in range(2))
    store(got["key_cache"], got["value_cache"])
    for name, read in (
        ("key_cache", cpu_attention.read_keys),
        ("value_cache", cpu_attention.read_values),
    ):
        torch.testing.assert_close(read(got[name]), expected[name], equal_nan=True)
    cpu_attention.paged_attention(**without_launch_options(got), kernel=kernel)
    reference_attention(**expected)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)


def check_mla(case: MLACase, dtype: torch.dtype) -> None:
    """Compare with the reference, and check that a sequence has the same bits alone."""
    expected, got = (build_mla(case, "cpu", dtype) for _ in range(2))
    mla_reference(**expected)
    # Values are the first elements of the keys, and not written separately.
    store(got["cache"], got["cache"][..., :0])
    _attend_latents(**got)
    torch.testing.assert_close(
        got["out"], expected["out"], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    starts = got["query_starts"].tolist()
    for row, (first, last) in enumerate(pairwise(starts)):
        alone = {name: got[name][row : row + 1] for name in ("block_tables", "context_lens")}
        alone |= {name: got[name][first:last] for name in ("query", "out")}
        before = alone["out"].clone()
        _attend_latents(**got | alone | {"query_starts": torch.tensor([0, last - first]).int()})
        assert torch.equal(alone["out"], before)


def _attend_latents(cache: torch.Tensor, out: torch.Tensor, **arguments: Any) -> None:
    arguments["block_tables"] = arguments["block_tables"].contiguous()
    values = cache[..., : out.shape[2]]
    cpu_attention.paged_attention(key_cache=cache, value_cache=values, out=out, **arguments)
