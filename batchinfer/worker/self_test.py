"""Tests a loaded model on a few tokens, and compares the results before a job uses the model.

Callers compare paged attention with transformers' attention, fused modules with the modules that
they replace, and equal sequences of one batch with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.kv.model_config import Config, text_config
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


def verify(before: torch.Tensor, after: torch.Tensor, tolerance: float) -> bool:
    """Return True if ``before`` and ``after`` have the same shape and ``differing_rows`` finds no
    difference."""
    return before.shape == after.shape and not differing_rows(before, after, tolerance).any()


def differing_rows(before: torch.Tensor, after: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return bool [...], True for rows [..., width] in which the norm of ``after - before`` exceeds
    ``tolerance`` times the norm of ``before``.

    Rows of ``before`` with NaN or infinite values never count as different, because a job reports
    them as the row error ``nan_logits``.
    """
    before, after = before.float(), after.float()
    same: torch.Tensor = (after - before).norm(dim=-1) <= tolerance * before.norm(dim=-1)
    return before.isfinite().all(dim=-1).logical_and(same.logical_not())


class Swap(NamedTuple):
    parent: nn.Module
    name: str
    module: nn.Module


def swap_verified(
    swaps: Sequence[Swap],
    outputs: Callable[[], torch.Tensor],
    before: torch.Tensor,
    tolerance: float,
) -> bool:
    """Swap all modules if the model's results stay the same; otherwise, swap none.

    If every row has NaN or infinite values, the modules are not swapped, because the results cannot
    be compared.

    Args:
        outputs: runs the model and returns its results [..., width].
        before: results before the swap.

    Returns:
        True if the modules were swapped.
    """
    if not before.isfinite().all(dim=-1).any():
        return False
    originals = [Swap(parent, name, getattr(parent, name)) for parent, name, _ in swaps]
    try:
        _put(swaps)
        if verify(before, outputs(), tolerance):
            return True
    except torch.OutOfMemoryError:
        raise
    except Exception:  # for example, the model's code reads an attribute that the replacement lacks
        pass
    _put(originals)
    return False


def find_swaps(model: nn.Module, make: Callable[[Any], nn.Module | None]) -> list[Swap]:
    """List the modules of a model for which ``make`` returns a replacement."""
    return [
        Swap(parent, name, made)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (made := make(child)) is not None
    ]


def _put(swaps: Iterable[Swap]) -> None:
    for parent, name, module in swaps:
        setattr(parent, name, module)


class Probe:
    """Runs a model on equal sequences of a few tokens in one packed row, with a small pool.

    Args:
        token_ids: tokens of each sequence.
        adapters: number of each sequence's adapter; None for the base model.
        dtype: dtype of the pool; default: the weights' dtype.
        kernel: kernel of the linear layers, which determines the attention backend.
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
        layout = _one_group(layout)
        step = probe_step(token_ids, layout, num_sequences=num_sequences, positions=positions)
        if adapters is not None:
            step = replace(step, adapters=np.array(adapters, dtype=np.int32))
        self._step = step
        num_slots = step.block_tables.size + step.state_tables.size
        self.cache = KVCache(layout, num_slots, weight.device, dtype or weight.dtype)
        self.backend = make_backend(self.cache, kernel)

    def logits(self, backend: AttentionBackend | None = None) -> torch.Tensor:
        """Run the model, by default with ``self.backend``. Return logits [tokens of all sequences,
        vocabulary]."""
        return forward(self._model, self.cache, backend or self.backend, self._step)

    @contextmanager
    def in_forward(self, backend: AttentionBackend) -> Iterator[None]:
        """Set the forward context for the probe's step, so that modules can be called directly."""
        tensors = to_device(device_arrays(self._step), self.cache.pool.device)
        backend.begin_step(self._step, tensors)
        with forward_context(ForwardContext(self.cache, backend, tensors)):
            yield


def logits_in_chunks(
    model: nn.Module,
    layout: KVLayout,
    token_ids: Sequence[int],
    ends: Iterable[int],
    kernel: LinearKernel | None = None,
) -> torch.Tensor:
    """Compute one sequence in several steps. Return its logits [T, vocabulary].

    Args:
        ends: total number of tokens computed after each step.
    """
    weight = next(model.parameters())
    layout = _one_group(layout)
    num_slots = layout.blocks_for(len(token_ids)) + layout.slots_per_state
    cache = KVCache(layout, num_slots, weight.device, weight.dtype)
    backend = make_backend(cache, kernel)
    chunks = (
        probe_step(token_ids[:stop], layout, start=start) for start, stop in pairwise((0, *ends))
    )
    return torch.cat([forward(model, cache, backend, chunk) for chunk in chunks])


def _one_group(layout: KVLayout) -> KVLayout:
    """Return a layout in which one block table serves all layers.

    Probes do not need layer groups, which only save the memory of tokens outside a sliding window.
    """
    return replace(layout, groups=())


def probe_step(
    token_ids: Sequence[int],
    layout: KVLayout,
    *,
    start: int = 0,
    num_sequences: int = 1,
    positions: Sequence[int] | None = None,
) -> Step:
    """Make a step that computes the logits of all tokens of equal sequences, and samples nothing.
    The pool's first slots hold recurrent states. The following slots hold each sequence's blocks.

    Args:
        start: index of the first token to compute; earlier tokens are already in the pool.
        positions: positions of the computed tokens, by default their indices.
    """
    indices = np.arange(start, len(token_ids))
    if positions is None:
        positions = indices.tolist()
    block_size, num_tokens = layout.block_size, num_sequences * len(indices)
    num_blocks = layout.blocks_for(len(token_ids))
    slots_of_states = np.arange(num_sequences * layout.slots_per_state, dtype=np.int32)
    slots_of_blocks = np.arange(num_sequences * num_blocks, dtype=np.int32) + len(slots_of_states)
    table = slots_of_blocks.reshape(num_sequences, -1)
    firsts = len(slots_of_states) + np.arange(num_sequences) * num_blocks
    slots = firsts[:, None] * block_size + indices
    no_sampling: dict[str, Any] = {entry.name: np.empty(0) for entry in fields(SamplingBatch)}
    return Step(
        token_ids=np.tile(token_ids[start:], num_sequences).astype(np.int32),
        previous_sample=np.full(num_tokens, -1, np.int32),
        positions=np.tile(positions, num_sequences).astype(np.int32),
        query_starts=np.arange(num_sequences + 1, dtype=np.int32) * len(indices),
        context_lens=np.full(num_sequences, len(token_ids), np.int32),
        block_tables=table,
        slot_mapping=slots.reshape(-1),
        block_copies=np.empty((0, 2), np.int32),
        logits_indices=np.arange(num_tokens, dtype=np.int32),
        sampling=SamplingBatch(**no_sampling | {"penalties": None}),
        state_tables=slots_of_states.reshape(num_sequences, -1),
    )


def probe_block_size(config: Config, most: int) -> int:
    """Return the block size of a probe's pool: ``most``, or less if the length of attention chunks
    is not a multiple of ``most``. A job's ``engine.block_size`` has no effect on probes."""
    chunk = text_config(config).get("attention_chunk_size")
    return math.gcd(most, chunk) if isinstance(chunk, int) else most


class ModuleCall(NamedTuple):
    module: nn.Module
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    output: Any


@contextmanager
def record_calls(modules: Iterable[nn.Module]) -> Iterator[list[ModuleCall]]:
    """Record calls to the modules inside the ``with`` block, each when it returns. Arguments are
    not copied."""
    calls: list[ModuleCall] = []

    def record(*call: Any) -> None:
        calls.append(ModuleCall(*call))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class AttentionCall(NamedTuple):
    layer: int
    query: torch.Tensor
    variant: AttentionVariant


class AttentionRecorder:
    """An attention backend that records its calls and passes them to another backend."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.calls: list[AttentionCall] = []
        self._backend = backend

    def begin_step(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        self._backend.begin_step(step, tensors)

    def attend(self, layer: int, query: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
        self.calls.append(AttentionCall(layer, query.clone(), variant))
        return self._backend.attend(layer, query, variant)
