"""Paged attention on a CUDA device, computed by the project's Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from batchinfer.engine.kv.kv_shapes import KVShape
from batchinfer.engine.step import Step
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.kv_cache import KVCache

_Kind = tuple[int, int, KVShape]
"""Window, number of query heads and KV shape. Layers with equal values share a work list."""


@dataclass
class _Work:
    plan: Any
    layers: set[int] = field(default_factory=set)


class CudaAttention:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        query_lens = np.diff(step.query_starts)
        self._begin(
            tensors,
            shares=shares_pieces(step),
            min_query_len=int(query_lens.min(initial=2)),
            max_query_len=int(query_lens.max(initial=0)),
            max_context_len=int(step.context_lens.max(initial=0)),
        )
        chunk_lens = query_lens[query_lens > 1]
        self._chunk_bounds = {"num_tokens": int(chunk_lens.sum()), "max_chunks": len(chunk_lens)}

    def begin_captured(
        self,
        tensors: Mapping[str, torch.Tensor],
        max_context_len: int,
        *,
        shares: bool,
        max_chunks: int,
    ) -> None:
        """Begin a step without reading the arrays' contents on the host. The captured launches can
        then be replayed after the contents change.

        Args:
            shares: true if steps that replay the launches may have shared prefixes.
            max_chunks: largest number of sequences that compute more than one token.
        """
        self._begin(
            tensors,
            shares=shares,
            min_query_len=0,
            max_query_len=2 if max_chunks else 1,
            max_context_len=max_context_len,
        )
        num_tokens = len(tensors["token_ids"])
        self._chunk_bounds = {"num_tokens": num_tokens, "max_chunks": max_chunks}

    def _begin(self, tensors: Mapping[str, torch.Tensor], *, shares: bool, **bounds: int) -> None:
        self._tensors = tensors
        # With a prompt window, tokens do not see the positions between the prompt and the window.
        # In context pieces that sequences share, the kernels cannot mask these positions.
        self._shares = shares and not any(self._cache.layout.prompt_windows)
        self._bounds: dict[str, Any] = dict(bounds)
        self._work: dict[_Kind, _Work] = {}
        self._chunks: dict[_Kind, Any] = {}
        self._scan_work: Any = None

    def scan_work(self) -> Any:
        """Return the work list of the step's chunks for recurrent layers, or None if recurrent
        layers must compute token by token."""
        from batchinfer.kernels.chunk_scan import plan_scan

        if self._bounds["max_query_len"] <= 1:
            return None
        if self._scan_work is None:
            self._scan_work = plan_scan(self._tensors["query_starts"], **self._chunk_bounds)
        return self._scan_work

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        from batchinfer.kernels.paged_attention import paged_attention

        out = self._output(layer, query)
        tables, query_starts, context_lens = self._contexts(layer)
        options = variant.options(self._tensors.get("prompt_lens"))
        paged_attention(
            query,
            self._cache.key(layer),
            self._cache.value(layer),
            tables,
            query_starts,
            context_lens,
            out=out,
            **options,
            query_ends=self._query_ends(variant),
            work=self._decode_work(layer, query, _planned_window(options)),
            launch=layer,
            chunks=self._chunk_work(layer, query),
        )
        return out

    def _output(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], self._cache.shape(layer).value_width)

    def _query_ends(self, variant: AttentionVariant) -> torch.Tensor | None:
        return None if variant.ignores_query_ends else self._tensors.get("query_ends")

    def _contexts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block tables of a layer's group, the query starts and the context lengths."""
        group, tensors = self._cache.group(layer), self._tensors
        tables = tensors["other_tables"][group - 1] if group else tensors["block_tables"]
        return tables, tensors["query_starts"], tensors["context_lens"]

    def _chunk_work(self, layer: int, query: torch.Tensor) -> Any:
        from batchinfer.kernels.chunk_attention import plan_chunks

        if self._bounds["max_query_len"] <= 1:
            return None
        kind = self._kind(layer, query, window=0)
        if kind not in self._chunks:
            tokens = self._query_tile(layer, query)
            starts = self._tensors["query_starts"]
            self._chunks[kind] = plan_chunks(starts, tokens=tokens, **self._chunk_bounds)
        return self._chunks[kind]

    def _query_tile(self, layer: int, query: torch.Tensor) -> int:
        from batchinfer.kernels.attention_loop import Heads
        from batchinfer.kernels.chunk_attention import query_tile

        return query_tile(Heads.of(query, self._cache.key(layer), self._cache.value(layer)))

    def _decode_work(self, layer: int, query: torch.Tensor, window: int) -> Any:
        from batchinfer.kernels.decode_plan import plan_decode

        if self._bounds["min_query_len"] > 1:
            return None

        def plan() -> Any:
            shape = self._cache.shape(layer)
            return plan_decode(
                self._tensors["query_starts"],
                self._tensors["context_lens"],
                order=self._tensors["order"] if self._shares else None,
                shared_lens=self._tensors["shared_lens"] if self._shares else None,
                num_heads=query.shape[1],
                num_kv_heads=shape.num_kv_heads,
                value_width=shape.value_width,
                max_context_len=self._bounds["max_context_len"],
                sliding_window=window,
                num_launches=self._cache.layout.num_layers,
            )

        return self._work_of(layer, self._kind(layer, query, window), plan)

    def _kind(self, layer: int, query: torch.Tensor, window: int) -> _Kind:
        return window, query.shape[1], self._cache.shape(layer)

    def _work_of(self, layer: int, kind: _Kind, plan: Callable[[], Any]) -> Any:
        """Return the work list for layers of this kind. A layer can use a work list only once,
        because the kernel counts in the list which items are taken."""
        work = self._work.get(kind)
        if work is None or layer in work.layers:
            work = self._work[kind] = _Work(plan())
        work.layers.add(layer)
        return work.plan


class BatchInvariantAttention(CudaAttention):
    """Attention that sums in a fixed order, so that a row's bits do not depend on its batch.
    Decodes and chunks use the same kernel, and each sequence reads a shared prefix separately."""

    def scan_work(self) -> None:
        """Return None: the bits of a chunked scan would depend on where chunks begin."""

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        from batchinfer.kernels.batch_invariant_attention import batch_invariant_attention

        out = self._output(layer, query)
        options = variant.options(self._tensors.get("prompt_lens"))
        batch_invariant_attention(
            query,
            self._cache.key(layer),
            self._cache.value(layer),
            *self._contexts(layer),
            out=out,
            **options,
            query_ends=self._query_ends(variant),
            work=self._batch_invariant_work(layer, query, _planned_window(options)),
            launch=layer,
        )
        return out

    def _batch_invariant_work(self, layer: int, query: torch.Tensor, window: int) -> Any:
        from batchinfer.kernels.attention_loop import Heads
        from batchinfer.kernels.batch_invariant_attention import (
            batch_invariant_query_tile,
            plan_batch_invariant,
        )

        def plan() -> Any:
            heads = Heads.of(query, self._cache.key(layer), self._cache.value(layer))
            return plan_batch_invariant(
                self._tensors["query_starts"],
                self._tensors["context_lens"],
                tokens=batch_invariant_query_tile(heads),
                num_heads=query.shape[1],
                value_width=self._cache.shape(layer).value_width,
                max_context_len=self._bounds["max_context_len"],
                sliding_window=window,
                num_launches=self._cache.layout.num_layers,
                num_tokens=self._chunk_bounds["num_tokens"],
                max_chunks=self._chunk_bounds["max_chunks"],
            )

        return self._work_of(layer, self._kind(layer, query, window), plan)


class LatentCudaAttention(CudaAttention):
    """Attends to latents (MLA), which all heads share. Each sequence reads a shared prefix
    separately."""

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        """Return the attended latents [T, Hq, rank] of queries [T, Hq, rank + rotary width]."""
        from batchinfer.kernels.mla_attention import mla_attention

        out = self._output(layer, query)
        mla_attention(
            query,
            self._cache.key(layer),
            *self._contexts(layer),
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
        from batchinfer.kernels.mla_attention import mla_query_tile

        return mla_query_tile(query)


def _planned_window(options: Mapping[str, Any]) -> int:
    """Return the window to plan a work list for, which is 0 (the whole context) for a layer with a
    prompt window."""
    return int(options["sliding_window"]) if options["prompt_lens"] is None else 0


def shares_pieces(step: Step) -> bool:
    """Return true if some sequences of a step share a prefix long enough for the kernels to read it
    once for all of them."""
    from batchinfer.kernels.decode_plan import DECODE_PIECE

    shared = step.shared_prefixes
    return shared is not None and int(shared.shared_lens.max()) >= DECODE_PIECE
