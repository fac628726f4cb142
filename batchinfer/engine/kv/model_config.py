"""Reads values that several packages need from a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")
"""Config keys for the number of experts that a token uses."""

# Keys under which the configs of different families give the maximum length of a sequence, in order
# of preference.
_MAX_POSITIONS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"),
)


def text_config(config: Config) -> Config:
    """Return the language model's config, which multimodal configs nest in ``text_config``."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def max_positions(config: Config) -> int | None:
    """Return the maximum length of a sequence in tokens; None if the config sets no limit.

    YaRN's factor multiplies the original length. With other scalings, the config's limit already
    includes the factor.
    """
    text = text_config(config)
    limit = next((int(text[key]) for key in _MAX_POSITIONS if text.get(key)), None)
    if limit is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    is_yarn = (rope.get("rope_type") or rope.get("type")) == "yarn"
    if is_yarn and isinstance(original, int) and isinstance(factor, int | float):
        return max(limit, int(original * factor))
    return limit
