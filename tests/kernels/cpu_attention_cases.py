"""The C kernels' attention beside its reference."""

from __future__ import annotations

from dataclasses import replace

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
from tests.kernels.cpu_kv_pool import store

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}

_ODD_WIDTHS = AttentionCase(
    "odd_widths", ((7, 30), (1, 57), (64, 64)), key_width=13, value_width=11, sliding_window=20
)
ODD_CASES = (_ODD_WIDTHS, replace(_ODD_WIDTHS, name="odd_widths_and_blocks", block_size=3))


def _on_a_cpu(case: AttentionCase) -> AttentionCase:
    """A case without what is a GPU's: hints on launching, and gigabytes of blocks."""
    case = replace(case, num_splits=None)
    return replace(case, num_heads=4, num_kv_heads=2, key_width=40) if len(case.lens) > 50 else case


CPU_CASES = tuple(
    {replace(case, name=""): case for case in map(_on_a_cpu, ATTENTION_CASES)}.values()
)
"""Those that differ on a CPU."""
CASES = (*CPU_CASES, *ODD_CASES)


def check_attention_over_fp8(case: AttentionCase, dtype: torch.dtype) -> None:
    """Of queries in ``dtype`` over a pool of float8, beside its reference."""
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
    """Of the build that is loaded; what its blocks hold is read back by position, too."""
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
