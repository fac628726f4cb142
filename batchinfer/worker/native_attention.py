"""Paged attention on the CPU by the project's C kernels, straight over the blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from batchinfer.engine.step import Step
from batchinfer.kernels.cpu import native
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.variant import AttentionVariant


class NativeAttention:
    """Attends over the pool's blocks for one step at a time."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the step that the following calls belong to, and its arrays as tensors."""
        self._tensors = {
            name: tensors[name].contiguous()
            for name in ("block_tables", "query_starts", "context_lens")
        }
        self._order, self._shared_lens = tensors.get("order"), tensors.get("shared_lens")

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [T, Hq, Dk]
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Attend over what is in the cache; returns [T, Hq, Dv]."""
        key_cache, value_cache = self._cache.key(layer), self._cache.value(layer)
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = query.new_empty(*query.shape[:2], value_cache.shape[3])
        native.paged_attention(
            query,
            key_cache,
            value_cache,
            self._tensors["block_tables"],
            self._tensors["query_starts"],
            self._tensors["context_lens"],
            out=out,
            scale=variant.scale,
            sliding_window=variant.sliding_window,
            softcap=variant.softcap,
            sinks=variant.sinks,
            order=self._order,
            shared_lens=self._shared_lens,
        )
        return out
