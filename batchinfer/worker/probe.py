"""A model run on a few tokens before it is trusted with a job, and a record of what it calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from batchinfer.engine.kv.layout import Config, KVLayout, text_config
from batchinfer.engine.step import SamplingBatch, Step
from batchinfer.worker.attention.attention import (
    AttentionBackend,
    ForwardContext,
    forward_context,
    make_backend,
)
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.forward import device_arrays, forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.transfer import to_device


class Probe:
    """Equal sequences of a few tokens, side by side in one packed row, over a cache of their own.

    Args:
        layout: of a pool for the model.
        token_ids: those of one sequence.
        num_sequences: each has blocks of its own.
        positions: what the model is told of each token of a sequence; None: from 0 on.
        adapters: the number of each sequence's adapter; None: the base model alone.
        dtype: of the cache; None: as the weights.
        kernel: what multiplies by the model's weights, and so how to attend.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: KVLayout,
        token_ids: Sequence[int],
        num_sequences: int = 1,
        *,
        positions: Sequence[int] | None = None,
        adapters: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        kernel: LinearKernel | None = None,
    ) -> None:
        weight = next(model.parameters())
        self._model = model
        step = probe_step(token_ids, num_sequences, layout, positions or range(len(token_ids)))
        if adapters is not None:
            step = replace(step, adapters=np.array(adapters, dtype=np.int32))
        self._step = step
        self.cache = KVCache(layout, step.block_tables.size, weight.device, dtype or weight.dtype)
        self.backend = make_backend(self.cache, kernel)

    def logits(self, backend: AttentionBackend | None = None) -> torch.Tensor:
        """Logits [tokens of all sequences, vocabulary] of the model as it is now.

        Args:
            backend: attends in place of ``self.backend``.
        """
        return forward(self._model, self.cache, backend or self.backend, self._step)

    @contextmanager
    def in_forward(self, backend: AttentionBackend | None = None) -> Iterator[None]:
        """Open the probe's step, so that modules of the model can be called by themselves."""
        backend = backend or self.backend
        tensors = to_device(device_arrays(self._step), self.cache.pool.device)
        backend.begin_step(self._step, tensors)
        with forward_context(ForwardContext(self.cache, backend, tensors)):
            yield


class ModuleCall(NamedTuple):
    """A call of a module: what it took and gave."""

    module: nn.Module
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    output: Any


@contextmanager
def record_calls(
    modules: Iterable[nn.Module], *, clone: bool = False
) -> Iterator[list[ModuleCall]]:
    """Record each call of one of the modules inside, when it has returned.

    Args:
        clone: record copies of positional arguments and the output, which what is called later may
            change in place; else the very objects.
    """
    calls: list[ModuleCall] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], options: Any, output: Any) -> None:
        if clone:
            arguments, output = tuple(map(_cloned, arguments)), _cloned(output)
        calls.append(ModuleCall(module, arguments, options, output))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class AttentionCall(NamedTuple):
    """What a layer asked of paged attention."""

    layer: int
    query: torch.Tensor
    variant: AttentionVariant


class AttentionRecorder:
    """A backend that records what it is asked, and asks another."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.calls: list[AttentionCall] = []
        self._backend = backend

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._backend.begin_step(step, tensors)

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        self.calls.append(AttentionCall(layer, query.clone(), variant))
        return self._backend.attend(layer, query, variant)


def probe_step(
    token_ids: Sequence[int], num_sequences: int, layout: KVLayout, positions: Sequence[int]
) -> Step:
    """A step that computes every logit of equal sequences, each in blocks of its own, and samples
    nothing."""
    length, block_size = len(token_ids), layout.block_size
    num_blocks = layout.blocks_for(length)
    table = np.arange(num_sequences * num_blocks, dtype=np.int32).reshape(num_sequences, -1)
    places = np.arange(length)
    slots = table[:, places // block_size].astype(np.int64) * block_size + places % block_size
    return Step(
        token_ids=np.array([*token_ids] * num_sequences, np.int32),
        previous_sample=np.full(num_sequences * length, -1, np.int32),
        positions=np.array([*positions] * num_sequences, np.int32),
        query_starts=np.arange(num_sequences + 1, dtype=np.int32) * length,
        context_lens=np.full(num_sequences, length, np.int32),
        block_tables=table,
        slot_mapping=slots.reshape(-1),
        block_copies=np.empty((0, 2), np.int32),
        logits_indices=np.arange(num_sequences * length, dtype=np.int32),
        sampling=_no_sampling(),
    )


def probe_block_size(config: Config, most: int) -> int:
    """Tokens per block of a pool to try a model in, whatever the engine's: at most ``most``, and
    such that blocks fill the chunks that layers attend within, if any do."""
    chunk = text_config(config).get("attention_chunk_size")
    return math.gcd(most, chunk) if isinstance(chunk, int) else most


def chunk_step(token_ids: Sequence[int], start: int, stop: int, layout: KVLayout) -> Step:
    """The tokens from ``start`` to ``stop`` of one sequence, whose others before are in the pool.

    Args:
        token_ids: of the whole sequence, which has the pool's first blocks.
        start: position of the first token to compute.
        stop: position behind the last one.
        layout: of the pool.
    """
    places = np.arange(start, stop)
    num_blocks = layout.blocks_for(len(token_ids))
    return Step(
        token_ids=np.array(token_ids[start:stop], np.int32),
        previous_sample=np.full(len(places), -1, np.int32),
        positions=places.astype(np.int32),
        query_starts=np.array([0, len(places)], np.int32),
        context_lens=np.array([stop], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        slot_mapping=places.astype(np.int64),
        block_copies=np.empty((0, 2), np.int32),
        logits_indices=np.arange(len(places), dtype=np.int32),
        sampling=_no_sampling(),
    )


def _no_sampling() -> SamplingBatch:
    values: dict[str, Any] = {entry.name: np.empty(0) for entry in fields(SamplingBatch)}
    return SamplingBatch(**(values | {"penalties": None}))
