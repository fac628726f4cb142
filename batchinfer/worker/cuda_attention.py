"""Paged attention on a CUDA device by the project's Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from batchinfer.engine.step import Step
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.variant import AttentionVariant


class CudaAttention:
    """Attends over the pool's blocks for one step at a time."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the step that the following calls belong to, and its arrays on the device."""
        self._tensors = tensors
        self._max_query_len = int(np.diff(step.query_starts).max(initial=0))
        self._max_context_len = int(step.context_lens.max(initial=0))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [T, Hq, Dk]
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Attend over what is in the cache; returns [T, Hq, Dv]."""
        from batchinfer.kernels.paged_attention import paged_attention

        out = query.new_empty(*query.shape[:2], self._cache.layout.value_width)
        paged_attention(
            query,
            self._cache.key(layer),
            self._cache.value(layer),
            self._tensors["block_tables"],
            self._tensors["query_starts"],
            self._tensors["context_lens"],
            out=out,
            scale=variant.scale,
            sliding_window=variant.sliding_window,
            softcap=variant.softcap,
            sinks=variant.sinks,
            max_query_len=self._max_query_len,
            max_context_len=self._max_context_len,
        )
        return out
