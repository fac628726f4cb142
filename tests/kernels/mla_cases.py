"""Inputs of attention to latents (MLA), and its reference implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.kernels import reference
from batchinfer.kernels.chunk_attention import plan_chunks
from batchinfer.kernels.decode_plan import plan_decode
from batchinfer.kernels.mla_attention import head_tile, mla_query_tile
from tests.kernels.cases import AttentionCase, Case, build_attention

RANK, ROTARY = 32, 24
_MIXED = ((7, 7), (1, 33), (1, 257), (7, 40), (1, 1), (30, 100))


@dataclass(frozen=True)
class MLACase(Case):
    """A step: `lens` holds (query_len, context_len) of every sequence."""

    lens: tuple[tuple[int, int], ...]
    num_heads: int
    rank: int = RANK
    rotary: int = ROTARY
    block_size: int = 16
    num_splits: int | None = None


INTERPRETED_MLA_CASES = (
    MLACase("mixed", _MIXED, num_heads=6),
    MLACase("several_head_tiles", _MIXED, num_heads=80, block_size=32),
    MLACase("heads_of_no_power_of_two", ((1, 70), (9, 20)), num_heads=20),
    MLACase("split", ((1, 1), (1, 64), (1, 65), (1, 257)), num_heads=3, num_splits=3),
    MLACase("one_piece", ((1, 257), (1, 3)), num_heads=5, num_splits=1),
    MLACase("no_query_and_padding", ((0, 9), (1, 0), (5, 20), (0, 0), (1, 3)), num_heads=4),
    MLACase("blocks_of_24", ((1, 100), (5, 60)), num_heads=4, block_size=24),
)
MLA_CASES = (
    *INTERPRETED_MLA_CASES,
    *(
        MLACase(f"deepseek_{heads}", (*_MIXED, (1, 4097), (300, 1111)), heads, 512, 64)
        for heads in (16, 20, 40, 64, 128)
    ),
)


def build_mla(case: MLACase, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `mla_attention` except its work lists."""
    shape = AttentionCase(
        case.name,
        case.lens,
        case.num_heads,
        num_kv_heads=1,
        key_width=case.rank + case.rotary,
        value_width=case.rank,
        block_size=case.block_size,
    )
    arguments = build_attention(shape, device, dtype).arguments
    names = ("query", "block_tables", "query_starts", "context_lens", "scale")
    out = torch.full_like(arguments["out"], float("nan"))
    return {name: arguments[name] for name in names} | {"cache": arguments["key_cache"], "out": out}


def work_lists(case: MLACase, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the work lists for `mla_attention`."""
    query_lens, context_lens = zip(*case.lens, strict=True)
    starts, heads = arguments["query_starts"], case.num_heads
    decodes = plan_decode(
        starts,
        arguments["context_lens"],
        num_heads=heads,
        num_kv_heads=heads // head_tile(heads),
        value_width=case.rank,
        max_context_len=max(context_lens),
        num_splits=case.num_splits,
    )
    tokens = mla_query_tile(arguments["query"])
    chunks = plan_chunks(starts, tokens=tokens, num_tokens=sum(query_lens))
    has_chunks = max(query_lens) > 1
    return {"work": decodes, "chunks": chunks if has_chunks else None}


def mla_reference(cache: torch.Tensor, out: torch.Tensor, **arguments: Any) -> None:
    """Reference implementation: values are the first elements of the latents."""
    values = cache[..., : out.shape[2]]
    reference.paged_attention(key_cache=cache, value_cache=values, out=out, **arguments)
