"""Layer groups: layers with the same window, whose KV is freed together.

A pool slot holds one block of all layers in a group. All slots have the same size, so that one free
list serves every group. Layers with the same window are split into groups whose size wastes the
least memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST_GROUPS = 8
"""Limit on the number of groups, because each group needs a block table per step."""
_MOST_UNUSED = 0.15
"""Largest share of the pool that may be padding. If every split of the layers wastes more, all
layers form one full-attention group."""
_ALL_SLIDE = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Families without ``layer_types`` in which every layer has the config's window."""

_PROMPT_LAYERS = "reference_sliding_attention"
"""Type of layers whose tokens see a sliding window and, in addition, the whole prompt."""

Int = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    window: int
    """Number of tokens that a token attends to, including itself; 0: all tokens."""
    layers: tuple[int, ...]


def num_outside_window(num_tokens: int, window: int, block_size: int) -> int:
    """Return the number of leading blocks outside the window of the token after ``num_tokens``."""
    return max(num_tokens - window + 1, 0) // block_size if window else 0


def num_outside_windows(num_tokens: Int, window: int, block_size: int) -> Int:
    """Return ``num_outside_window`` for several sequences, [S]."""
    if not window:
        return np.zeros_like(num_tokens)
    outside: Int = np.maximum(num_tokens - window + 1, 0) // block_size
    return outside


def most_in_window(window: int, block_size: int, num_new: int = 1) -> int:
    """Return the maximum number of blocks that ``num_new`` adjacent tokens attend to and fill."""
    return -(-(window - 1 + num_new + block_size - 1) // block_size)


def most_slots(windows: tuple[int, ...], block_size: int, num_tokens: int, num_new: int = 1) -> int:
    """Return the maximum number of pool slots that a sequence holds until it has all its tokens.

    Args:
        windows: window of each layer group; 0 = full attention.
        num_tokens: final number of tokens.
        num_new: maximum number of tokens that a step computes.
    """
    blocks = -(-num_tokens // block_size)
    return sum(
        min(blocks, most_in_window(window, block_size, num_new)) if window else blocks
        for window in windows
    )


def layer_groups(
    config: Mapping[str, Any], stored: Sequence[int], max_model_len: int
) -> tuple[LayerGroup, ...]:
    """Return a model's layer groups, full attention first; none if no layer stores KV.

    Windows of ``max_model_len`` tokens or more count as full attention.

    Args:
        config: the language model's config, with the defaults of its family.
        stored: elements per token that each layer stores. A layer that stores 0 is in no group.
    """
    chunks = layer_chunks(config, len(stored))  # a token attends to at most one chunk
    windows = list(map(max, layer_windows(config, len(stored)), chunks))
    windows = [window if window < max_model_len else 0 for window in windows]
    storing = [layer for layer, size in enumerate(stored) if size]
    if not storing:
        return ()
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
    """Return the size of the chunks within which each layer attends (Llama 4); 0: no chunks."""
    chunk, kinds = config.get("attention_chunk_size"), config.get("layer_types") or ()
    if not isinstance(chunk, int) or len(kinds) != num_layers:
        return [0] * num_layers
    return [chunk if kind == "chunked_attention" else 0 for kind in kinds]


def layer_windows(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the window of each layer; 0 = full attention. If the config is ambiguous, all windows
    are 0, because full attention is always correct."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or window < 2:
        return [0] * num_layers
    if kinds and len(kinds) == num_layers:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    return [window if config.get("model_type") in _ALL_SLIDE else 0] * num_layers


def prompt_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return each layer's window if its tokens also see the whole prompt (Unlimited-OCR), else 0.
    The tuple is empty if no layer has such a window.

    The pool keeps all KV of these layers.
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ()
    if _PROMPT_LAYERS not in kinds or len(kinds) != num_layers or not isinstance(window, int):
        return ()
    return tuple(window if kind == _PROMPT_LAYERS else 0 for kind in kinds)


def _slot_size(kinds: list[list[int]], stored: Sequence[int]) -> int | None:
    """Return the elements per token of a slot; None if every size wastes too much memory.

    At the optimal size, the first layers of some window fill a slot exactly. The candidates are
    therefore the cumulative sums of the layers' sizes, for each window.
    """
    total = sum(stored)
    sums = {s for kind in kinds for s in accumulate(stored[layer] for layer in kind)}
    best, least = None, _MOST_UNUSED
    for size in sorted(sums, reverse=True):
        if size < max(stored):
            break
        groups = sum(len(_cut(kind, stored, size)) for kind in kinds)
        unused = 1 - total / (groups * size)
        if groups <= _MOST_GROUPS and unused < least:
            best, least = size, unused
    return best


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
