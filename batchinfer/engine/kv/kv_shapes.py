"""Reads the shape of each layer's KV, and which layer stores it, from a model's config.

In Gemma 4, full-attention layers have wider heads than other layers. In MiMo V2, full-attention
layers have fewer KV heads. The last layers of Gemma 3n and 4 attend to the KV of an earlier layer
of the same type.
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
        "kimi_linear",
        "minicpm3",
        "youtu",
    }
)
"""Families that attend like DeepSeek V2: all heads share one latent per token."""
_TWICE_IN_WINDOWS = frozenset({"mimo_v2_flash"})
"""Families whose sliding-window layers have twice the config's number of KV heads."""

_SHAPE_KEYS = ("head_dim", "num_key_value_heads", "v_head_dim")


@dataclass(frozen=True, slots=True)
class KVShape:
    num_kv_heads: int
    key_width: int
    """Elements of one key vector."""
    value_width: int
    """Elements of one value vector."""
    values_in_keys: bool = False
    """True if a value is the first part of its key and is not stored separately."""

    @property
    def elements(self) -> int:
        """Stored elements per token."""
        stored = self.key_width + (0 if self.values_in_keys else self.value_width)
        return self.num_kv_heads * stored


def kv_shapes(text: Mapping[str, Any], num_layers: int, common: KVShape) -> tuple[KVShape, ...]:
    """Return the shape of each layer's KV; empty if all layers have the shape ``common``.

    Args:
        text: the language model's config, with the defaults of its family.
        common: shape of layers without an entry in the config.

    Raises:
        ValueError: the config has an invalid ``per_layer_config``.
    """
    shapes = [common] * num_layers
    for layer, shape in _by_layer(text, num_layers).items():
        width = shape.get("head_dim", common.key_width)
        heads = shape.get("num_key_value_heads", common.num_kv_heads)
        shapes[layer] = KVShape(heads, width, shape.get("v_head_dim", width))
    if text.get("model_type") in _TWICE_IN_WINDOWS:
        twice = KVShape(2 * common.num_kv_heads, common.key_width, common.value_width)
        for layer, kind in enumerate(text.get("layer_types") or ()):
            shapes[layer] = twice if kind == "sliding_attention" else common
    return () if all(shape == common for shape in shapes) else tuple(shapes)


def _by_layer(text: Mapping[str, Any], num_layers: int) -> dict[int, Mapping[str, Any]]:
    """Return the shapes that a config gives for individual layers, keyed by layer number."""
    config = text.get("per_layer_config") or {}
    try:
        shapes = {int(layer): shape for layer, shape in config.items()}  # keys may be padded: "05"
        is_valid = all(shape.get(key, 1) > 0 for shape in shapes.values() for key in _SHAPE_KEYS)
        is_valid = is_valid and shapes.keys() <= set(range(num_layers))
    except (AttributeError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"per_layer_config must map layer numbers from 0 to {num_layers - 1} to positive "
            "values of head_dim, num_key_value_heads or v_head_dim"
        )
    return shapes


def has_latent(text: Mapping[str, Any]) -> bool:
    """Return true if a model can cache the latent that its keys and values are projected from
    (MLA)."""
    return bool(text.get("kv_lora_rank")) and text.get("model_type") in _LATENT_FAMILIES


def kv_owners(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layer that stores each layer's KV; empty if every layer stores its own KV.

    The last ``num_kv_shared_layers`` layers store no KV. Each layer without KV uses the KV of the
    last layer of its type that stores KV.

    Raises:
        ValueError: a layer that should share KV has no earlier layer of its type.
    """
    num_shared, kinds = text.get("num_kv_shared_layers") or 0, text.get("layer_types") or ()
    if not num_shared or len(kinds) != num_layers:
        return ()
    first = num_layers - num_shared if isinstance(num_shared, int) else -1
    last_of_kind = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not 0 < first < num_layers or not last_of_kind.keys() >= set(kinds[first:]):
        raise ValueError(
            f"num_kv_shared_layers is {num_shared!r}, and the model has "
            f"{num_layers} layers: each of the last num_kv_shared_layers layers "
            "needs an earlier layer of the same type (layer_types)"
        )
    return (*range(first), *(last_of_kind[kind] for kind in kinds[first:]))
