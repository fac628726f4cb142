"""KV of models whose layers differ: the shape of each layer's KV, and which layer stores it.

Gemma 4 has wider heads in its full-attention layers, MiMo V2 fewer heads; the last layers of Gemma
3n and 4 attend to the KV of an earlier layer of the same type.
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
"""Families known to attend like DeepSeek V2, to one latent for all heads."""
_TWICE_IN_WINDOWS = frozenset({"mimo_v2_flash"})
"""Families whose sliding-window layers have twice the KV heads of the config."""

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
    """Values are the first elements of their keys and not stored separately."""

    @property
    def elements(self) -> int:
        """Stored elements per token."""
        stored = self.key_width + (0 if self.values_in_keys else self.value_width)
        return self.num_kv_heads * stored


def kv_shapes(text: Mapping[str, Any], num_layers: int, common: KVShape) -> tuple[KVShape, ...]:
    """The shape of each layer's KV; empty if all layers have ``common``.

    Args:
        text: the language model's config, with its family's defaults.
        common: the shape that the config gives for all layers.

    Raises:
        ValueError: naming the invalid key.
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
    """Shapes of single layers in a config, by layer number."""
    given = text.get("per_layer_config") or {}
    try:
        shapes = {int(layer): own for layer, own in given.items()}  # transformers writes "05"
        is_valid = all(own.get(key, 1) > 0 for own in shapes.values() for key in _SHAPE_KEYS)
        is_valid = is_valid and shapes.keys() <= set(range(num_layers))
    except (AttributeError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"per_layer_config must give some of the layers 0 to {num_layers - 1} a head_dim, "
            "num_key_value_heads or v_head_dim, all of them positive numbers"
        )
    return shapes


def has_latent(text: Mapping[str, Any]) -> bool:
    """Whether a model can cache the latent that its keys and values are projected from (MLA)."""
    return bool(text.get("kv_lora_rank")) and text.get("model_type") in _LATENT_FAMILIES


def kv_owners(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layer that stores the KV of each layer; empty if every layer stores its own.

    The last ``num_kv_shared_layers`` layers use the KV of the last earlier layer of their type.

    Raises:
        ValueError: there is no such layer.
    """
    num_shared, kinds = text.get("num_kv_shared_layers") or 0, text.get("layer_types") or ()
    if not num_shared or len(kinds) != num_layers:
        return ()
    first = num_layers - num_shared if isinstance(num_shared, int) else -1
    last_of_kind = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not 0 < first < num_layers or not last_of_kind.keys() >= set(kinds[first:]):
        raise ValueError(
            f"num_kv_shared_layers is {num_shared!r}; each type that layer_types "
            f"gives the last layers must also occur before them, among {num_layers} layers"
        )
    return (*range(first), *(last_of_kind[kind] for kind in kinds[first:]))
