"""Layer groups: layers with the same window, whose KV is freed together behind that window.

A pool slot holds a block of one group's layers. All slots have equal size, so that one free list
serves every group; layers of each window are split into groups of a size that wastes least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST_GROUPS = 8
"""Each group needs a block table per step."""
_MOST_UNUSED = 0.15
"""Largest share of padding in the pool; above it all layers form one full-attention group."""
_ALL_SLIDE = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Families without layer types in which every layer has the config's window."""

Int = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a slot."""

    window: int
    """Tokens that a token attends to, including itself; 0: all."""
    layers: tuple[int, ...]


def num_outside_window(num_tokens: int, window: int, block_size: int) -> int:
    """Leading blocks that tokens from position ``num_tokens`` on do not attend to."""
    return max(num_tokens - window + 1, 0) // block_size if window else 0


def num_outside_windows(num_tokens: Int, window: int, block_size: int) -> Int:
    """[S] as ``num_outside_window``, for several sequences."""
    if not window:
        return np.zeros_like(num_tokens)
    outside: Int = np.maximum(num_tokens - window + 1, 0) // block_size
    return outside


def most_in_window(window: int, block_size: int, num_new: int = 1) -> int:
    """Most blocks that ``num_new`` consecutive tokens attend to and fill."""
    return -(-(window - 1 + num_new + block_size - 1) // block_size)


def most_slots(windows: tuple[int, ...], block_size: int, num_tokens: int, num_new: int = 1) -> int:
    """Most pool slots that one sequence holds until it has ``num_tokens`` tokens.

    Args:
        windows: of each layer group; 0 is full attention.
        num_new: most tokens computed in one step.
    """
    blocks = -(-num_tokens // block_size)
    return sum(
        min(blocks, most_in_window(window, block_size, num_new)) if window else blocks
        for window in windows
    )


def layer_groups(
    config: Mapping[str, Any], stored: Sequence[int], max_model_len: int
) -> tuple[LayerGroup, ...]:
    """A model's layer groups, full attention first.

    Windows of ``max_model_len`` tokens or more count as full attention.

    Args:
        config: the language model's config, with its family's defaults.
        stored: elements per token that each layer stores; layers that store none are left out.
        max_model_len: most tokens of a sequence.
    """
    chunks = layer_chunks(config, len(stored))  # an upper bound on a token's view
    windows = list(map(max, layer_windows(config, len(stored)), chunks))
    windows = [window if window < max_model_len else 0 for window in windows]
    storing = [layer for layer, size in enumerate(stored) if size]
    kinds = {
        window: [layer for layer in storing if windows[layer] == window]
        for window in sorted({windows[layer] for layer in storing})
    }
    size = _slot_size(list(kinds.values()), stored)
    if size is None:
        return (LayerGroup(0, tuple(storing)),)
    return tuple(
        LayerGroup(window, group)
        for window, layers in kinds.items()
        for group in _cut(layers, stored, size)
    )


def layer_chunks(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Chunk size within which each layer attends (Llama 4); 0: no chunks."""
    chunk, kinds = config.get("attention_chunk_size"), config.get("layer_types") or ()
    if not isinstance(chunk, int) or len(kinds) != num_layers:
        return [0] * num_layers
    return [chunk if kind == "chunked_attention" else 0 for kind in kinds]


def layer_windows(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """The window of each layer if the config is unambiguous, else 0, which is safe."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or window < 2:
        return [0] * num_layers
    if kinds and len(kinds) == num_layers:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    return [window if config.get("model_type") in _ALL_SLIDE else 0] * num_layers


def _slot_size(kinds: list[list[int]], stored: Sequence[int]) -> int | None:
    """Elements per token in a slot; None if every size wastes too much.

    The optimal size is filled exactly by the first layers of some window: the candidates are
    those sums.
    """
    total = sum(stored)
    sums = {sum(stored[layer] for layer in kind[:end]) for kind in kinds for end in _ends(kind)}
    best, least = None, _MOST_UNUSED
    for size in sorted(sums, reverse=True):
        if size < max(stored):
            break
        groups = sum(len(_cut(kind, stored, size)) for kind in kinds)
        unused = 1 - total / (groups * size)
        if groups <= _MOST_GROUPS and unused < least:
            best, least = size, unused
    return best


def _ends(kind: list[int]) -> range:
    return range(1, len(kind) + 1)


def _cut(layers: list[int], stored: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Split layers in order into groups of at most ``size`` elements."""
    groups: list[list[int]] = []
    free = 0
    for layer in layers:
        if stored[layer] > free:
            groups.append([])
            free = size
        groups[-1].append(layer)
        free -= stored[layer]
    return [tuple(group) for group in groups]
