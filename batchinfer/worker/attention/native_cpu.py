"""Paged attention on the CPU, computed by the project's C kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchinfer.engine.step import Step
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.cpu.decoder_layer import StepArgs
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel


def instructions_for(dtype: torch.dtype, like: LinearKernel | None) -> str:
    available = cpu_attention.available(dtype)
    if like is not None and like.kind == "own" and like.instructions in available:
        return like.instructions
    return available[0]


class NativeAttention:
    """Paged attention in C.

    Args:
        like: kernel of the model's linear layers. If it is a C kernel, attention uses the same
            instruction set, so that one name identifies the instructions of both. For another
            kernel, attention uses the fastest instruction set.
    """

    def __init__(self, cache: KVCache, like: LinearKernel | None = None) -> None:
        self._cache = cache
        dtype = cache.pool.dtype
        self.kernel = cpu_attention.kernel_of(dtype, instructions_for(dtype, like))
        """The C kernel's number, from ``kernel_of``."""
        self.joins_layers = dtype == cache.dtype and not any(cache.layout.prompt_windows)
        """True if whole layers can run in C: the pool has the dtype that the layers compute in, and
        no layer has a prompt window (``AttentionVariant.prompt_window``)."""

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._lens = [tensors[name].contiguous() for name in ("query_starts", "context_lens")]
        self._tables = [tensors["block_tables"].contiguous(), *tensors.get("other_tables", ())]
        self._order, self._shared_lens = tensors.get("order"), tensors.get("shared_lens")
        self._query_ends = tensors.get("query_ends")
        self._prompt_lens = tensors.get("prompt_lens")

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = query.new_empty(*query.shape[:2], self._cache.shape(layer).value_width)
        cpu_attention.paged_attention(
            query, *self._context(layer), out=out, **self._options(variant)
        )
        return out

    def arguments(
        self,
        layer: int,
        query: torch.Tensor,  # [T, Hq, Dk], last dimension contiguous
        variant: AttentionVariant,
        *,
        out: torch.Tensor,  # [T, Hq, Dv], last two dimensions contiguous
    ) -> cpu_attention.AttentionArgs:
        """Return the C function's arguments, with the addresses of ``out`` and ``query``."""
        options = self._options(variant)
        return cpu_attention.attention_args(query, *self._context(layer), out=out, **options)

    def point_to_step(self, group: int, arguments: StepArgs) -> None:
        """Point ``arguments`` to this step's arrays for a layer group."""
        tables, (starts, lens) = self._tables[group], self._lens
        arguments.block_tables, arguments.query_starts = tables.data_ptr(), starts.data_ptr()
        arguments.context_lens = lens.data_ptr()
        arguments.table_width, arguments.num_sequences = tables.shape[1], len(lens)
        arguments.order = None if self._order is None else self._order.data_ptr()
        shared_lens = self._shared_lens
        arguments.shared_lens = None if shared_lens is None else shared_lens.data_ptr()
        ends = self._query_ends
        arguments.query_ends = None if ends is None else ends.data_ptr()

    def _context(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return a layer's keys and values, its group's block tables, the query starts, and the
        context lengths."""
        tables = self._tables[self._cache.group(layer)]
        return self._cache.key(layer), self._cache.value(layer), tables, *self._lens

    def _options(self, variant: AttentionVariant) -> dict[str, Any]:
        return {
            **variant.options(self._prompt_lens),
            "order": self._order,
            "shared_lens": self._shared_lens,
            "query_ends": None if variant.ignores_query_ends else self._query_ends,
            "kernel": self.kernel,
        }
