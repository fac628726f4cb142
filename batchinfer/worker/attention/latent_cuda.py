"""Attention to latents on a CUDA device by the project's Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from batchinfer.worker.attention.triton import CudaAttention
from batchinfer.worker.attention.variant import AttentionVariant


class LatentCudaAttention(CudaAttention):
    """Attends to latents, which all heads share; a prefix that sequences share is read by each."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [T, Hq, rank + rotary width]
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Attended latents, [T, Hq, rank]."""
        from batchinfer.kernels.latent_attention import latent_attention

        out = query.new_empty(*query.shape[:2], self._cache.shape(layer).value_width)
        latent_attention(
            query,
            self._cache.key(layer),
            self._block_tables(layer),
            self._tensors["query_starts"],
            self._tensors["context_lens"],
            out=out,
            scale=variant.scale,
            work=self._decode_work(layer, query, window=0),
            launch=layer,
            chunks=self._chunk_work(layer, query),
        )
        return out

    def _begin(self, tensors: Mapping[str, torch.Tensor], *, shares: bool, **bounds: int) -> None:
        super()._begin(tensors, shares=False, **bounds)

    def _query_tile(self, layer: int, query: torch.Tensor) -> int:
        from batchinfer.kernels.latent_attention import latent_query_tile

        return latent_query_tile(query)
