"""Recognizes encoders and other bidirectional models by their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.config.types import format_value

_OFFSET_FAMILIES = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Families whose first position follows the position of padding (as in fairseq)."""
ENCODER_FAMILIES = (
    *_OFFSET_FAMILIES,
    *("bert", "distilbert", "electra", "eurobert", "modernbert", "nomic_bert"),
)
"""Supported values of ``model_type``; a test runs each."""


def attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Return True if attention is bidirectional: in encoders, and in some decoders (EmbeddingGemma
    with ``use_bidirectional_attention``, GTE-Qwen with ``is_causal: false``)."""
    text = config.get("text_config") or config
    both_ways = text.get("use_bidirectional_attention") or text.get("is_causal") is False
    return bool(both_ways) or is_encoder(config)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return True if the family is in ``ENCODER_FAMILIES`` and not configured as a decoder."""
    return config.get("model_type") in ENCODER_FAMILIES and not config.get("is_decoder")


def position_offset(config: Mapping[str, Any]) -> int:
    """Return the position of a text's first token."""
    if config.get("model_type") not in _OFFSET_FAMILIES:
        return 0
    return int(config.get("pad_token_id") or 0) + 1


def longest_text(values: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a text, from sentence_bert_config.json; None if it sets no limit.

    Raises:
        ValueError: the value is not a number of tokens.
    """
    length = values.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(
            f"max_seq_length is {format_value(length)}; it must be a whole number of 1 or more: "
            "fix the value, or leave it out"
        )
    return length
