"""Size of a hybrid model's recurrent state, and its place in slots of the KV pool.

A sequence's state has a fixed size, so it takes a fixed number of pool slots. They are found by a
table and need not be adjacent, so one free list serves both state and KV blocks, and no split of
memory has to be chosen. No torch, like ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATE_BYTES = 4
"""Bytes per element of state: float32, whatever the model's dtype."""
_LANES = 16
"""Elements of the widest vector of a CPU; narrower pieces of a head would waste lanes."""
_GATED_DELTA = frozenset(
    {
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    }
)
"""Families whose recurrent layers are Gated DeltaNet (Yang et al. 2024,
https://arxiv.org/abs/2412.06464)."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Equal pieces of one array of a layer's state. A piece is contiguous and lies in one slot."""

    num_pieces: int
    """Pieces per layer."""
    piece_elements: int

    def per_slot(self, slot_bytes: int) -> int:
        """Pieces that a slot holds."""
        return slot_bytes // (STATE_BYTES * self.piece_elements)

    def num_slots(self, num_layers: int, slot_bytes: int) -> int:
        """Slots for the pieces of all layers."""
        return -(-num_layers * self.num_pieces // self.per_slot(slot_bytes))


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """Heads and widths of a Gated DeltaNet layer."""

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    conv_width: int
    """Tokens that the convolution sees, including the current one."""

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_width + self.num_values

    @property
    def num_values(self) -> int:
        """Elements of the values of all heads."""
        return self.num_value_heads * self.value_width

    @property
    def num_projected(self) -> int:
        """Outputs of the input projections and inputs of the output projection: queries, keys,
        values, gates and decays; the layer's output."""
        return self.num_channels + 2 * self.num_values + 2 * self.num_value_heads


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Place of the recurrent state of one sequence in its slots.

    Each value head has a matrix [key width, value width], cut by columns into pieces
    [key width, columns]: columns do not depend on each other. The convolution has the last inputs
    of each channel, cut into pieces [conv_width - 1, channels]. Pieces of all layers follow each
    other, first those of the matrices, then, from the next slot on, those of the convolutions.
    """

    layers: tuple[int, ...]
    """The recurrent layers."""
    shape: GatedDeltaShape
    slot_bytes: int
    matrices: StatePart
    convolutions: StatePart

    @property
    def num_slots(self) -> int:
        """Slots of a sequence's state."""
        return self.first_conv_slot + self.convolutions.num_slots(len(self.layers), self.slot_bytes)

    @property
    def first_conv_slot(self) -> int:
        """Index in a sequence's slots of the first slot with states of convolutions."""
        return self.matrices.num_slots(len(self.layers), self.slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence's state, without unused ends of slots."""
        parts = (self.matrices, self.convolutions)
        elements = sum(part.num_pieces * part.piece_elements for part in parts)
        return STATE_BYTES * len(self.layers) * elements


def recurrent_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """The recurrent layers of a language model's config that can be run."""
    if text.get("model_type") not in _GATED_DELTA:
        return ()
    kinds = text.get("layer_types") or ()
    return tuple(at for at, kind in enumerate(kinds) if kind == "linear_attention")


def state_layout(text: Mapping[str, Any], slot_bytes: int) -> StateLayout | None:
    """The layout of a model's state in slots of at least ``min_slot_bytes``; None: it has no
    recurrent layers."""
    layers = recurrent_layers(text)
    if not layers:
        return None
    shape = _shape(text)
    return StateLayout(
        layers=layers,
        shape=shape,
        slot_bytes=slot_bytes,
        matrices=_fewest_slots(_matrix_cuts(shape), len(layers), slot_bytes),
        convolutions=_fewest_slots(_convolution_cuts(shape), len(layers), slot_bytes),
    )


def min_slot_bytes(text: Mapping[str, Any]) -> int:
    """Bytes of the smallest slot that can hold pieces of a model's state; 0 without such layers."""
    if not recurrent_layers(text):
        return 0
    shape = _shape(text)
    ways = (_matrix_cuts(shape), _convolution_cuts(shape))
    return STATE_BYTES * max(min(part.piece_elements for part in parts) for parts in ways)


def _shape(text: Mapping[str, Any]) -> GatedDeltaShape:
    return GatedDeltaShape(
        num_key_heads=int(text["linear_num_key_heads"]),
        num_value_heads=int(text["linear_num_value_heads"]),
        key_width=int(text["linear_key_head_dim"]),
        value_width=int(text["linear_value_head_dim"]),
        conv_width=int(text["linear_conv_kernel_dim"]),
    )


def _matrix_cuts(shape: GatedDeltaShape) -> list[StatePart]:
    """The ways to cut a layer's matrices into pieces of whole vectors."""
    columns = [n for n in _divisors(shape.value_width) if n % _LANES == 0] or [shape.value_width]
    return [StatePart(shape.num_values // n, shape.key_width * n) for n in columns]


def _convolution_cuts(shape: GatedDeltaShape) -> list[StatePart]:
    """The ways to cut the last inputs of a layer's convolution into pieces."""
    channels = _divisors(shape.num_channels)
    return [StatePart(shape.num_channels // n, (shape.conv_width - 1) * n) for n in channels]


def _fewest_slots(parts: list[StatePart], num_layers: int, slot_bytes: int) -> StatePart:
    """The way to cut an array that takes the fewest slots, with the largest pieces of these."""
    fitting = [part for part in parts if part.per_slot(slot_bytes)]
    return min(fitting, key=lambda part: (part.num_slots(num_layers, slot_bytes), part.num_pieces))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
