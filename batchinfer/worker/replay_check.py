"""Compares replays of CUDA graphs with plain steps, once all graphs are captured.

A graph with a frozen input, or with a buffer that another graph overwrites, computes wrong logits
without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.runner import OutOfMemory
from batchinfer.engine.step import Int32, SamplingBatch, SharedPrefixes, Step
from batchinfer.kernels.decode_plan import DECODE_PIECE
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.cuda_graphs.graph_sizes import Kind
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs, kind_of
from batchinfer.worker.forward import forward
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.oom import raise_out_of_memory
from batchinfer.worker.self_test import differing_rows

_TOLERANCE = 0.15
"""Tolerance in 16 bits. A replayed step is padded, so its products round differently."""
_MAX_DIFFERING = 0.5
"""Largest share of a step's rows that may exceed the tolerance in a model with experts, because
rounding can change the experts of a token."""
_LONG, _SHORT, _CHUNK = DECODE_PIECE + 12, 5, 7
_MOST_TOKENS = 128
"""Most tokens of a step, so that the check needs less memory than the job's steps."""


def replays_are_right(
    model: torch.nn.Module,
    cache: KVCache,
    graphs: StepGraphs,
    kernel: LinearKernel | None,
    log: Callable[[str], None],
) -> bool:
    """Compute a mixed step, a decode step with a shared prefix, and a decode step, each once with
    its graph and once without. Return False if the logits of one of them differ.

    Overwrites the pool's first blocks. Leaves out steps that have no graph. Compares nothing if the
    pool is too small, the model's sequences are too short, or the device has no memory left.

    Args:
        kernel: kernel of the model's linear layers.
        log: receives a line if the replays are wrong, or were not compared.
    """
    steps = _Steps(cache.layout, model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    if steps.num_slots > cache.num_blocks or graphs.max_model_len < _LONG:
        log(f"CUDA graphs were not compared with plain steps, which needs {_LONG} tokens")
        return True
    try:
        with raise_out_of_memory():
            wrong = _find_wrong(model, cache, graphs, kernel, steps)
    except OutOfMemory as error:
        log(f"CUDA graphs were not compared with plain steps: {error}")
        return True
    if wrong is not None:
        log(f"steps run without CUDA graphs, because graphs of {wrong} steps compute other logits")
    return wrong is None


@torch.inference_mode()
def _find_wrong(
    model: torch.nn.Module,
    cache: KVCache,
    graphs: StepGraphs,
    kernel: LinearKernel | None,
    steps: _Steps,
) -> Kind | None:
    """Return the kind of the first step whose replay computes other logits; None if none does."""
    slots, backend = steps.num_slots, make_backend(cache, kernel)
    has_experts = any("expert" in name for name, _ in model.named_parameters())
    most_differing = _MAX_DIFFERING if has_experts else 0.0
    cache.blocks[:slots] = 0  # recurrent states begin with zeros
    for step in steps.fill():
        forward(model, cache, backend, step)
    for step in steps.compared():
        size = graphs.size_for(step)
        before = cache.blocks[:slots].clone()
        plain = forward(model, cache, backend, step).clone()
        if size is None:
            continue
        cache.blocks[:slots] = before
        replayed = graphs.logits(step, size)
        if differing_rows(plain, replayed, _TOLERANCE).float().mean() > most_differing:
            return kind_of(step)
    return None


@dataclass(frozen=True)
class _Part:
    """Tokens of one sequence that a step computes, from ``start`` to before ``stop``."""

    sequence: int
    start: int
    stop: int


class _Steps:
    """Steps of a long sequence, a sequence that shares the long one's first tokens, and a short
    sequence. Each layer group has blocks of its own."""

    def __init__(self, layout: KVLayout, vocab_size: int) -> None:
        self._layout = layout
        self._token_ids = (np.arange(_LONG) * 7 + 3) % vocab_size
        blocks, groups = layout.blocks_for(_LONG), max(len(layout.windows), 1)
        shared = DECODE_PIECE // layout.block_size if layout.tokens_per_block else 0
        states = 3 * layout.slots_per_state
        tables = states + np.arange(groups * 3 * blocks, dtype=np.int32).reshape(groups, 3, blocks)
        tables[:, 1, :shared] = tables[:, 0, :shared]
        self._tables = tables
        self._states = np.arange(states, dtype=np.int32).reshape(3, -1)
        self._shared = shared * layout.block_size
        self.num_slots = states + groups * 3 * blocks

    def fill(self) -> Iterator[Step]:
        """Yield steps that compute the first tokens of the long and of the short sequence."""
        end = _LONG - 1 - _CHUNK
        for start in range(0, end, _MOST_TOKENS):
            yield self._step([_Part(0, start, min(start + _MOST_TOKENS, end))])
        yield self._step([_Part(2, 0, _SHORT - 2)])

    def compared(self) -> Iterator[Step]:
        """Yield the steps to compare: each continues the steps before it."""
        at, end = self._shared, _LONG - 1
        order = np.arange(3, dtype=np.int32)
        prefixes = SharedPrefixes(order, np.array([0, at, 0], np.int32)) if at else None
        chunk = [
            _Part(0, end - _CHUNK, end),
            _Part(1, at, at + 1),
            _Part(2, _SHORT - 2, _SHORT - 1),
        ]
        yield replace(self._step(chunk), shared_prefixes=prefixes)
        decodes = [_Part(0, end, end + 1), _Part(1, at + 1, at + 2), _Part(2, _SHORT - 1, _SHORT)]
        yield replace(self._step(decodes), shared_prefixes=prefixes)
        yield self._step(decodes)

    def _step(self, parts: Sequence[_Part]) -> Step:
        rows = [part.sequence for part in parts]
        counts = [part.stop - part.start for part in parts]
        positions = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        sequences = np.repeat(rows, counts)
        tables = self._tables[:, rows]
        slots = self._slots(sequences, positions)
        ends = np.cumsum(counts).astype(np.int32)
        no_sampling: dict[str, Any] = {entry.name: np.empty(0) for entry in fields(SamplingBatch)}
        return Step(
            token_ids=self._token_ids[positions].astype(np.int32),
            previous_sample=np.full(len(positions), -1, np.int32),
            positions=positions.astype(np.int32),
            query_starts=np.concatenate([[0], ends]).astype(np.int32),
            context_lens=np.array([part.stop for part in parts], np.int32),
            block_tables=tables[0],
            slot_mapping=slots[0],
            block_copies=np.empty((0, 2), np.int32),
            logits_indices=ends - 1,
            sampling=SamplingBatch(**no_sampling | {"penalties": None}),
            other_tables=tables[1:],
            other_slots=slots[1:],
            state_tables=self._states[rows],
        )

    def _slots(self, sequences: Int32, positions: Int32) -> Any:
        """Return the slots [G, T] of tokens; -1 for a model without attention."""
        size = self._layout.tokens_per_block
        if not size:
            return np.full((len(self._tables), len(positions)), -1, np.int64)
        return (
            self._tables[:, sequences, positions // size].astype(np.int64) * size + positions % size
        )
