"""Arrays that a captured step reads, always at the same addresses and with the same shapes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchinfer.engine.step import Int32, Step
from batchinfer.kernels.unpack_block_tables import unpack_block_tables
from batchinfer.worker.adapter_batch import step_adapters
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize

_ALIGNMENT = 16  # in bytes: the width of a Triton kernel's vector load
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_TORCH_DTYPES = {_INT32: torch.int32, _INT64: torch.int64}

Array = npt.NDArray[np.integer[Any]]


class _Place(NamedTuple):
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


class StepInputs:
    """Device memory for a step's arrays, filled by a single copy.

    The host writes the arrays into one buffer, padded to a graph size. Padding tokens follow the
    step's tokens and write no KV (their slot mapping is -1). Padding sequences have no tokens and
    no shared prefix, and come last in the order of shared prefixes. Block tables are at the end of
    the buffer and are only as long as the step needs. The captured step unpacks them to rows at
    fixed addresses.

    Args:
        num_groups: number of layer groups. Each group has its own slot mapping and block tables. A
            model without attention layers has one group, whose tables have no columns.
        num_adapters: number of the model's adapters. If the number is not 0, every step's arrays
            include the tokens of each adapter.
    """

    def __init__(
        self,
        largest: GraphSize,
        max_blocks: int,
        device: torch.device,
        num_groups: int = 1,
        num_adapters: int = 0,
        slots_per_state: int = 0,
    ) -> None:
        self._num_groups, self._max_blocks = num_groups, max_blocks
        self._num_adapters, self._slots_per_state = num_adapters, slots_per_state
        tables = (num_groups, largest.sequences, max_blocks)
        num_bytes = self._places(largest)["packed_tables"].offset + 4 * math.prod(tables)
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._tables = torch.zeros(tables, dtype=torch.int32, device=device)
        self._prev_token_ids = torch.zeros(largest.sequences, dtype=torch.int64, device=device)

    def holds(self, step: Step) -> bool:
        """Return true if the step's block tables, previous samples and adapters fit."""
        return (
            step.block_tables.shape[1] <= self._max_blocks
            and _num_previous(step) <= len(self._prev_token_ids)
            and (step.adapters is None or self._num_adapters > 0)
        )

    def load(self, step: Step, size: GraphSize, prev_token_ids: torch.Tensor | None) -> None:
        """Start copying to the device: a step's arrays, padded to a size, and the previous samples
        that the step needs.

        Args:
            prev_token_ids: int64 token ids that the previous step sampled;
                ``step.previous_sample`` indexes them.
        """
        places, tables = self._places(size), _stacked_tables(step)
        start = places["packed_tables"].offset
        # torch does not reuse the staging memory before the copy from it is done.
        pinned = self._bytes.device.type == "cuda"
        staging = torch.empty(start + tables.nbytes, dtype=torch.uint8, pin_memory=pinned)
        host = staging.numpy()
        arrays = _padded_arrays(step, size)
        if self._num_adapters:
            arrays |= _adapter_arrays(step)
        for name, (values, padding) in arrays.items():
            place, count = places[name], values.shape[-1]
            into = host[place.offset : place.end].view(place.dtype).reshape(place.shape)
            into[..., :count] = values
            into[..., count:] = padding
        host[start:] = tables.reshape(-1).view(np.uint8)
        self._bytes[: len(staging)].copy_(staging, non_blocking=True)
        num_previous = _num_previous(step)
        if num_previous:
            assert prev_token_ids is not None
            self._prev_token_ids[:num_previous].copy_(prev_token_ids[:num_previous])

    def of(self, size: GraphSize) -> dict[str, torch.Tensor]:
        """Return the device arrays of a step of this size. Call this inside the capture, because it
        launches kernels."""
        tensors = {
            name: self._bytes[place.offset : place.end]
            .view(_TORCH_DTYPES[place.dtype])
            .view(place.shape)
            for name, place in self._places(size).items()
        }
        tables, slots = self._tables[:, : size.sequences], tensors.pop("slots")
        unpack_block_tables(self._packed_tables(size), tensors.pop("tables_shape"), tables)
        drawn = tensors.pop("previous_sample")
        prev_token_ids = self._prev_token_ids[drawn.clamp(min=0)]
        return tensors | {
            "token_ids": torch.where(drawn >= 0, prev_token_ids, tensors["token_ids"]),
            "slot_mapping": slots[0],
            "other_slots": slots[1:],
            "block_tables": tables[0],
            "other_tables": tables[1:],
            "state_tables": tensors["state_tables"].view(size.sequences, self._slots_per_state),
        }

    def _packed_tables(self, size: GraphSize) -> torch.Tensor:
        return self._bytes[self._places(size)["packed_tables"].offset :].view(torch.int32)

    def _places(self, size: GraphSize) -> dict[str, _Place]:
        """Return each array's place in the buffer for this size. Packed block tables have only an
        offset, because their length varies."""
        tokens, sequences = (size.tokens,), (size.sequences,)
        shapes: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...] = (
            ("token_ids", tokens, _INT64),
            ("previous_sample", tokens, _INT64),
            ("positions", tokens, _INT64),
            ("slots", (self._num_groups, *tokens), _INT64),
            ("logits_indices", sequences, _INT64),
            ("query_starts", (size.sequences + 1,), _INT32),
            ("context_lens", sequences, _INT32),
            ("prompt_lens", sequences, _INT32),
            ("order", sequences, _INT32),
            ("shared_lens", sequences, _INT32),
            ("state_tables", (size.sequences * self._slots_per_state,), _INT32),
            ("tables_shape", (2,), _INT32),
            ("packed_tables", (0,), _INT32),
        )
        if self._num_adapters:
            starts = ("adapter_starts", (self._num_adapters + 1,), _INT32)
            shapes = (("adapter_tokens", tokens, _INT64), starts, *shapes)
        places, offset = {}, 0
        for name, shape, dtype in shapes:
            places[name] = _Place(offset, shape, dtype)
            offset = -(-places[name].end // _ALIGNMENT) * _ALIGNMENT
        return places


def _num_previous(step: Step) -> int:
    """Return how many of the previous step's samples to copy: all samples up to the last one
    used."""
    return int(step.previous_sample.max(initial=-1)) + 1


def _padded_arrays(step: Step, size: GraphSize) -> dict[str, tuple[Array, int | Array]]:
    """Return the arrays of a step except its block tables, each with its padding value."""
    count = step.num_sequences
    places = np.arange(size.sequences, dtype=np.int32)
    order, shared_lens = places[:count], np.zeros(count, dtype=np.int32)
    if step.shared_prefixes is not None:
        order, shared_lens = step.shared_prefixes.order, step.shared_prefixes.shared_lens
    prompt_lens = step.context_lens if step.prompt_lens is None else step.prompt_lens
    slots = step.slot_mapping[None]
    if len(step.other_slots):
        slots = np.concatenate([slots, step.other_slots])
    return {
        "token_ids": (step.token_ids, 0),
        "previous_sample": (step.previous_sample, -1),
        "positions": (step.positions, 0),
        "slots": (slots, -1),
        "logits_indices": (step.logits_indices, 0),
        "query_starts": (step.query_starts, step.num_tokens),
        "context_lens": (step.context_lens, 0),
        "prompt_lens": (prompt_lens, 0),
        "order": (order, places[count:]),
        "shared_lens": (shared_lens, 0),
        "state_tables": (step.state_tables.reshape(-1), 0),
        "tables_shape": (np.array(step.block_tables.shape), 0),
    }


def _adapter_arrays(step: Step) -> dict[str, tuple[Array, int | Array]]:
    """Return the arrays of ``StepAdapters``, each with its padding value."""
    adapters = step_adapters(step)
    tokens, starts = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int32)
    if adapters is not None:
        tokens, starts = adapters.tokens, adapters.starts
    return {"adapter_tokens": (tokens, 0), "adapter_starts": (starts, int(starts[-1]))}


def _stacked_tables(step: Step) -> Int32:
    """Return contiguous block tables [G, S, length of the longest table] of all layer groups."""
    tables = step.block_tables[None]
    if len(step.other_tables):
        tables = np.concatenate([tables, step.other_tables])
    return np.ascontiguousarray(tables, dtype=np.int32)
