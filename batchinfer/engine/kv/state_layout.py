"""Size of a hybrid model's recurrent state, and its layout in slots of the KV pool.

A sequence's state has a fixed size, so it takes a fixed number of pool slots. A table lists the
slots, so the slots need not be adjacent. One free list therefore serves both states and KV blocks,
and memory is not split between them in advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from batchinfer.engine.kv.recurrent_families import (
    RecurrentShape,
    is_recurrent,
    recurrent_layers,
    recurrent_shape,
)

STATE_BYTES = 4
"""Bytes per element of state, which is float32 for every dtype of the model."""
_LANES = 16
"""Float32 elements in the widest vector register of a CPU."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One array of a layer's state, cut into equal pieces. A piece is contiguous, in one slot."""

    num_pieces: int
    piece_elements: int

    def per_slot(self, slot_bytes: int) -> int:
        return slot_bytes // (STATE_BYTES * self.piece_elements)

    def num_slots(self, num_layers: int, slot_bytes: int) -> int:
        return -(-num_layers * self.num_pieces // self.per_slot(slot_bytes))


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of the recurrent state of one sequence in its slots.

    The state of a head is a matrix [key width, value width]. The columns of the matrix do not
    depend on each other, so the matrix is cut into pieces [key width, columns]. The state of a
    convolution is the last inputs of each channel, cut into pieces [conv_width - 1, channels]. The
    slots hold the pieces of all layers' matrices, and then, starting in a new slot, the pieces of
    all convolutions.
    """

    layers: tuple[int, ...]
    shape: RecurrentShape
    slot_bytes: int
    matrices: StatePart
    convolutions: StatePart

    @property
    def num_slots(self) -> int:
        return self.first_conv_slot + self.convolutions.num_slots(len(self.layers), self.slot_bytes)

    @property
    def first_conv_slot(self) -> int:
        """Index of the first slot with convolution state among a sequence's slots."""
        return self.matrices.num_slots(len(self.layers), self.slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence's state, excluding padding of slots."""
        parts = (self.matrices, self.convolutions)
        elements = sum(part.num_pieces * part.piece_elements for part in parts)
        return STATE_BYTES * len(self.layers) * elements


def state_layout(text: Mapping[str, Any], slot_bytes: int) -> StateLayout | None:
    """Return the layout of a model's state in slots of ``slot_bytes``, at least ``min_slot_bytes``;
    None if the model has no recurrent layers."""
    if not is_recurrent(text):
        return None
    layers, shape = recurrent_layers(text), recurrent_shape(text)
    return StateLayout(
        layers=layers,
        shape=shape,
        slot_bytes=slot_bytes,
        matrices=_fewest_slots(_matrix_cuts(shape), len(layers), slot_bytes),
        convolutions=_fewest_slots(_convolution_cuts(shape), len(layers), slot_bytes),
    )


def min_slot_bytes(text: Mapping[str, Any]) -> int:
    """Return the bytes of the smallest slot that can hold one piece of a matrix or one piece of a
    convolution; 0 if the model has no recurrent layers."""
    if not is_recurrent(text):
        return 0
    shape = recurrent_shape(text)
    ways = (_matrix_cuts(shape), _convolution_cuts(shape))
    return STATE_BYTES * max(min(part.piece_elements for part in parts) for parts in ways)


def layer_state_bytes(text: Mapping[str, Any]) -> int:
    """Return the bytes of the larger part of a recurrent layer's state: its matrices, or the inputs
    of its convolution.

    With slots of this size, a state wastes less than one slot, and takes about as many slots as the
    model has layers.
    """
    shape = recurrent_shape(text)
    matrices = shape.key_width * shape.num_values
    return STATE_BYTES * max(matrices, (shape.conv_width - 1) * shape.num_channels)


def _matrix_cuts(shape: RecurrentShape) -> list[StatePart]:
    columns = _widths(shape.value_width)
    return [StatePart(shape.num_values // n, shape.key_width * n) for n in columns]


def _convolution_cuts(shape: RecurrentShape) -> list[StatePart]:
    channels = _widths(shape.num_channels)
    return [StatePart(shape.num_channels // n, (shape.conv_width - 1) * n) for n in channels]


def _fewest_slots(parts: list[StatePart], num_layers: int, slot_bytes: int) -> StatePart:
    """Return the cut that takes the fewest slots; in a tie, the cut with the largest pieces."""
    fitting = [part for part in parts if part.per_slot(slot_bytes)]
    return min(fitting, key=lambda part: (part.num_slots(num_layers, slot_bytes), part.num_pieces))


def _widths(whole: int) -> list[int]:
    """Return the widths of pieces into which ``whole`` elements can be cut: whole CPU vectors, or
    else one piece. Elements outside a full vector may be rounded differently, so results would
    depend on the slot size."""
    return [n for n in _divisors(whole) if n % _LANES == 0] or [whole]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
