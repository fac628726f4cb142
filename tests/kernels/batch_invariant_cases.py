"""Inputs of batch-invariant attention, made from the inputs of `paged_attention`."""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.kernels.attention_loop import Heads
from batchinfer.kernels.batch_invariant_attention import (
    batch_invariant_query_tile,
    plan_batch_invariant,
)
from tests.kernels.cases import planned_window


def batch_invariant_arguments(
    arguments: dict[str, Any],
    *,
    max_context_len: int | None = None,
    piece: int | None = None,
    splits: bool = True,
) -> dict[str, Any]:
    """Return the arguments of `batch_invariant_attention`, made from those of `paged_attention`."""
    kept = {name: value for name, value in arguments.items() if name in _TAKEN}
    query, starts = kept["query"], kept["query_starts"]
    chunk_lens = torch.diff(starts.cpu())
    chunk_lens = chunk_lens[chunk_lens > 1]
    work = plan_batch_invariant(
        starts,
        kept["context_lens"],
        tokens=batch_invariant_query_tile(Heads.of(query, kept["key_cache"], kept["value_cache"])),
        num_tokens=int(chunk_lens.sum()),
        max_chunks=len(chunk_lens),
        num_heads=query.shape[1],
        value_width=kept["value_cache"].shape[3],
        max_context_len=max_context_len or arguments["max_context_len"],
        sliding_window=planned_window(kept),
        piece=piece,
        splits=splits,
    )
    return kept | {"work": work}


_TAKEN = (
    "query", "key_cache", "value_cache", "block_tables", "query_starts", "context_lens", "scale",
    "out", "sliding_window", "softcap", "sinks", "query_ends", "prompt_lens",
)  # fmt: skip
