"""The C kernels' attention to latents beside its reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from batchinfer.kernels.cpu import paged_attention as cpu_attention
from tests.kernels.cpu_attention_cases import TOLERANCE
from tests.kernels.cpu_kv_pool import store
from tests.kernels.mla_cases import (
    INTERPRETED_LATENT_CASES,
    MLACase,
    build_mla,
    latent_reference,
)

_MIXED = INTERPRETED_LATENT_CASES[0]
CASES = (
    *(case for case in INTERPRETED_LATENT_CASES if case.num_splits is None),
    replace(_MIXED, name="odd_widths", rank=13, rotary=6),
    replace(_MIXED, name="odd_blocks", block_size=3),
    replace(_MIXED, name="deepseek", num_heads=16, rank=512, rotary=64),
)


def check_latents(case: MLACase, dtype: torch.dtype) -> None:
    """Close to the reference, and a sequence's bits are those that it has alone."""
    expected, got = (build_mla(case, "cpu", dtype) for _ in range(2))
    latent_reference(**expected)
    # Values are not written where they lie in their keys.
    store(got["cache"], got["cache"][..., :0])
    attend(**got)
    torch.testing.assert_close(
        got["out"], expected["out"], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    starts = got["query_starts"].tolist()
    for row, (first, last) in enumerate(pairwise(starts)):
        alone = {name: got[name][row : row + 1] for name in ("block_tables", "context_lens")}
        alone |= {name: got[name][first:last] for name in ("query", "out")}
        before = alone["out"].clone()
        attend(**got | alone | {"query_starts": torch.tensor([0, last - first]).int()})
        assert torch.equal(alone["out"], before)


def attend(cache: torch.Tensor, out: torch.Tensor, **arguments: Any) -> None:
    arguments["block_tables"] = arguments["block_tables"].contiguous()
    values = cache[..., : out.shape[2]]
    cpu_attention.paged_attention(key_cache=cache, value_cache=values, out=out, **arguments)
