"""Attention within chunks (Llama 4), computed by a backend for plain causal attention.

In Llama 4's chunked layers, a token attends only to itself and to the earlier tokens of its own
chunk, which has ``attention_chunk_size`` tokens. For these layers, the step is cut at the chunk
boundaries: the tokens of each chunk become a separate sequence, whose context and block table begin
with the chunk. The cut does not change the results, because keys are rotated before they are
stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from batchinfer.engine.step import Bool, Int32, SharedPrefixes, Step
from batchinfer.worker.attention.cuda import CudaAttention
from batchinfer.worker.attention.native_cpu import NativeAttention
from batchinfer.worker.attention.torch_cpu import CpuAttention
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.transfer import to_device

PlainAttention = CpuAttention | NativeAttention | CudaAttention


class ChunkedAttention:
    """Computes attention for a model with chunked layers (``KVLayout.chunks``)."""

    joins_layers = False
    """False: layers that run entirely in C would read the step before ``cut_at_chunks`` cuts it."""

    def __init__(self, cache: KVCache, unchunked: PlainAttention, chunked: PlainAttention) -> None:
        self._cache, self._unchunked, self._chunked = cache, unchunked, chunked
        self._chunk = max(cache.layout.chunks)

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._unchunked.begin_step(step, tensors)
        cut = cut_at_chunks(step, self._chunk, self._cache.layout.block_size)
        self._chunked.begin_step(cut, to_device(_arrays(cut), self._cache.pool.device))

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        backend = self._chunked if self._cache.layout.chunks[layer] else self._unchunked
        return backend.attend(layer, query, variant)


class CapturedChunkedAttention(ChunkedAttention):
    """``ChunkedAttention`` on a CUDA device, for steps that CUDA graphs can capture."""

    _unchunked: CudaAttention
    _chunked: CudaAttention

    def begin_captured(
        self,
        tensors: Mapping[str, torch.Tensor],
        max_context_len: int,
        *,
        shares: bool,
        max_chunks: int,
    ) -> None:
        """Begin a step like ``CudaAttention.begin_captured``.

        Steps for which ``crosses_chunks`` is true must not be replayed.
        """
        within = _within_chunks(tensors, self._chunk, self._cache.layout.block_size)
        longest = min(max_context_len, self._chunk)
        self._unchunked.begin_captured(
            tensors, max_context_len, shares=shares, max_chunks=max_chunks
        )
        self._chunked.begin_captured(within, longest, shares=shares, max_chunks=max_chunks)


def crosses_chunks(step: Step, chunk: int) -> bool:
    """Return true if some sequence of a step computes tokens of more than one chunk."""
    starts = step.context_lens - np.diff(step.query_starts)
    return bool((starts // chunk < (step.context_lens - 1) // chunk).any())


def _within_chunks(
    tensors: Mapping[str, torch.Tensor], chunk: int, block_size: int
) -> dict[str, torch.Tensor]:
    """Compute on the device what ``cut_at_chunks`` returns for a step in which no sequence crosses
    a chunk boundary."""
    begin = (tensors["context_lens"] - 1).clamp(min=0) // chunk * chunk
    columns = (begin // block_size)[:, None] + torch.arange(
        chunk // block_size, device=begin.device
    )
    columns = columns.clamp(max=tensors["block_tables"].shape[1] - 1)
    other_tables = tensors["other_tables"]
    within = dict(tensors) | {
        "context_lens": tensors["context_lens"] - begin,
        "block_tables": tensors["block_tables"].gather(1, columns),
        "other_tables": other_tables.gather(2, columns.expand(len(other_tables), *columns.shape)),
    }
    begins = begin[tensors["order"].long()]
    shared = (tensors["shared_lens"] - begins).clamp(min=0)
    return within | {"shared_lens": shared * (begins == begins.roll(1))}


def cut_at_chunks(step: Step, chunk: int, block_size: int) -> Step:
    """Return a step in which the context of each sequence is a single chunk of ``chunk`` tokens.

    A sequence that computes tokens of several chunks is split into one sequence per chunk. The
    tokens keep their order. Each block table lists the blocks of one chunk.
    """
    ends = step.context_lens.astype(np.int64)
    starts = ends - np.diff(step.query_starts)
    first, last = starts // chunk, np.maximum(ends - 1, starts) // chunk
    pieces = last - first + 1
    sequence = np.repeat(np.arange(len(ends)), pieces)
    at = first[sequence] + np.arange(len(sequence)) - (np.cumsum(pieces) - pieces)[sequence]
    begin = at * chunk
    context = np.minimum(ends[sequence] - begin, chunk)
    computed = context - np.maximum(starts[sequence] - begin, 0)
    columns = (begin // block_size)[:, None] + np.arange(chunk // block_size)
    columns = np.minimum(columns, max(step.block_tables.shape[1] - 1, 0))
    others, shared = step.other_tables, step.shared_prefixes
    shared = _shared_within(shared, begin) if len(sequence) == len(ends) else None
    return replace(
        step,
        query_starts=np.concatenate([[0], np.cumsum(computed)]).astype(np.int32),
        context_lens=context.astype(np.int32),
        block_tables=step.block_tables[sequence[:, None], columns],
        other_tables=others[:, sequence[:, None], columns] if len(others) else others,
        shared_prefixes=shared,
    )


def _shared_within(shared: SharedPrefixes | None, begin: np.ndarray) -> SharedPrefixes | None:
    """Return the part of the shared prefixes that lies in the sequences' chunks. Each sequence's
    chunk begins at its position in ``begin`` [S]."""
    if shared is None:
        return None
    begins = begin[shared.order]
    same: Bool = begins == np.roll(begins, 1)
    left: Int32 = np.where(same, np.maximum(shared.shared_lens - begins, 0), 0).astype(np.int32)
    return SharedPrefixes(shared.order, left)


def _arrays(step: Step) -> dict[str, np.ndarray]:
    names = ("query_starts", "context_lens", "block_tables", "other_tables")
    arrays = {name: getattr(step, name) for name in names}
    if step.shared_prefixes is not None:
        arrays["order"] = step.shared_prefixes.order
        arrays["shared_lens"] = step.shared_prefixes.shared_lens
    return arrays
