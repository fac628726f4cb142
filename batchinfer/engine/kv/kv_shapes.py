"""Which KV each layer of a model keeps, where layers differ: its shape, and whose it is.

Gemma 4 has wider heads in its layers of full attention, MiMo V2 fewer of them; the last layers of
Gemma 3n and 4 attend to what an earlier layer of their kind has stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LATENT_FAMILIES = frozenset(
    {
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "minicpm3",
        "youtu",
    }
)
"""Families that are known to attend as DeepSeek V2 does, to one latent of all heads."""
_TWICE_IN_WINDOWS = frozenset({"mimo_v2_flash"})
"""Families whose layers with a window have twice the KV heads that the config names."""

_SHAPE_KEYS = ("head_dim", "num_key_value_heads", "v_head_dim")


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one token in one layer."""

    num_kv_heads: int
    key_width: int
    """Elements of one key vector."""
    value_width: int
    """Elements of one value vector."""
    values_in_keys: bool = False
    """A value is the first elements of its key, and not stored by itself."""

    @property
    def elements(self) -> int:
        """Of the keys and values of a token, as they are stored."""
        stored = self.key_width + (0 if self.values_in_keys else self.value_width)
        return self.num_kv_heads * stored


def kv_shapes(text: Mapping[str, Any], num_layers: int, common: KVShape) -> tuple[KVShape, ...]:
    """The shape of each layer's KV, where a layer's differs from ``common``; else nothing.

    Args:
        text: the language model's config, with its family's defaults.
        num_layers: its layers.
        common: what the config names for all layers.

    Raises:
        ValueError: naming the key that says what cannot be.
    """
    shapes = [common] * num_layers
    for layer, own in _by_layer(text, num_layers).items():
        width = own.get("head_dim", common.key_width)
        heads = own.get("num_key_value_heads", common.num_kv_heads)
        shapes[layer] = KVShape(heads, width, own.get("v_head_dim", width))
    if text.get("model_type") in _TWICE_IN_WINDOWS:
        twice = KVShape(2 * common.num_kv_heads, common.key_width, common.value_width)
        for layer, kind in enumerate(text.get("layer_types") or ()):
            shapes[layer] = twice if kind == "sliding_attention" else common
    return () if all(shape == common for shape in shapes) else tuple(shapes)


def _by_layer(text: Mapping[str, Any], num_layers: int) -> dict[int, Mapping[str, Any]]:
    """What a config says of single layers, by their numbers."""
    said = text.get("per_layer_config") or {}
    try:
        shapes = {int(layer): own for layer, own in said.items()}  # transformers writes "05"
        right = all(own.get(key, 1) > 0 for own in shapes.values() for key in _SHAPE_KEYS)
        right = right and shapes.keys() <= set(range(num_layers))
    except (AttributeError, TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(
            f"per_layer_config must give some of the layers 0 to {num_layers - 1} a head_dim, "
            "num_key_value_heads or v_head_dim, all of them positive numbers"
        )
    return shapes


def has_latent(text: Mapping[str, Any]) -> bool:
    """Whether a model can keep the latent that its keys and values are projected from (MLA)."""
    return bool(text.get("kv_lora_rank")) and text.get("model_type") in _LATENT_FAMILIES


def kv_owners(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layer that stores what each layer attends to, where that is not itself; else nothing.

    The last ``num_kv_shared_layers`` attend to the KV of the last layer of their kind before them.

    Raises:
        ValueError: there is no such layer before them.
    """
    num_shared, kinds = text.get("num_kv_shared_layers") or 0, text.get("layer_types") or ()
    if not num_shared or len(kinds) != num_layers:
        return ()
    first = num_layers - num_shared if isinstance(num_shared, int) else -1
    last_of_kind = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not 0 < first < num_layers or not last_of_kind.keys() >= set(kinds[first:]):
        raise ValueError(
            f"num_kv_shared_layers is {num_shared!r}; of each kind that layer_types names for the "
            f"last layers there must be one before them, among {num_layers} in all"
        )
    return (*range(first), *(last_of_kind[kind] for kind in kinds[first:]))
