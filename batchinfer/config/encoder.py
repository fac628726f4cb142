"""Which models read a text whole, every token seeing those after it, by their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OFFSET_FAMILIES = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Their first position is the one after that of padding (fairseq's way)."""
ENCODER_FAMILIES = (
    *_OFFSET_FAMILIES,
    *("bert", "distilbert", "electra", "eurobert", "modernbert", "nomic_bert"),
)
"""Values of ``model_type`` of encoders that are run; a test runs each."""


def attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether a model's tokens see those after them: encoders, and decoders that were trained so
    (EmbeddingGemma's ``use_bidirectional_attention``, GTE-Qwen's ``is_causal: false``)."""
    text = config.get("text_config") or config
    both_ways = text.get("use_bidirectional_attention") or text.get("is_causal") is False
    return bool(both_ways) or is_encoder(config)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config is one of ``ENCODER_FAMILIES``, and not made a decoder."""
    return config.get("model_type") in ENCODER_FAMILIES and not config.get("is_decoder")


def position_offset(config: Mapping[str, Any]) -> int:
    """The position of a text's first token."""
    if config.get("model_type") not in _OFFSET_FAMILIES:
        return 0
    return int(config.get("pad_token_id") or 0) + 1
