"""Settings of the model to run, and facts from its config.json, for example about its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchinfer.config.settings_base import Record, coerce_fields, format_value

Runner = Literal["generate", "pooling", "whole_texts"]
"""What a model computes. generate: text. pooling: hidden states. whole_texts: hidden states, with
each text computed in one step and without a KV cache.
"""

_OFFSET_FAMILIES = ("camembert", "mpnet", "roberta", "xlm-roberta")
"""Families that number positions from the padding token's id plus 1 (as in fairseq)."""
ENCODER_FAMILIES = (
    *_OFFSET_FAMILIES,
    *("bert", "distilbert", "electra", "eurobert", "modernbert", "nomic_bert"),
)
"""Values of ``model_type`` of the supported encoders. A test runs each of them."""


@dataclass(frozen=True)
class ModelConfig(Record):
    """Settings of a model, with the keys of the job file's section ``model``."""

    name: str
    """Hub id or local directory."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """Hub id or local directory; None for the model's own tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights; auto for the checkpoint's data type."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and output together; None for the model's limit."""
    quantization: str | None = None
    """A value of ``QUANTIZATIONS``; None for the checkpoint's quantization."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folder or hub id of each LoRA adapter, by name. Requests name an adapter by its number: 1 for
    the first."""
    runner: Runner = "generate"
    """What the model computes. A model for pooling may lack an output head."""

    @property
    def pools(self) -> bool:
        """True if the model computes hidden states instead of text."""
        return self.runner in ("pooling", "whole_texts")

    def __post_init__(self) -> None:
        coerce_fields(self)
        length = self.max_model_len
        self._require("max_model_len", length is None or length >= 1, "1 or more")


def attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Return True if attention is bidirectional: in encoders, and in some decoders (EmbeddingGemma
    with ``use_bidirectional_attention``, GTE-Qwen with ``is_causal: false``)."""
    text = config.get("text_config") or config
    # In Gemma 4, "vision" means that attention is bidirectional only within images.
    both_ways = text.get("use_bidirectional_attention") not in (None, False, "vision")
    return both_ways or text.get("is_causal") is False or is_encoder(config)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return True if the family is in ``ENCODER_FAMILIES`` and not configured as a decoder."""
    return config.get("model_type") in ENCODER_FAMILIES and not config.get("is_decoder")


def position_offset(config: Mapping[str, Any]) -> int:
    """Return the position of a text's first token."""
    if config.get("model_type") not in _OFFSET_FAMILIES:
        return 0
    return int(config.get("pad_token_id") or 0) + 1


def longest_text(values: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens of a text; None if there is no limit.

    Args:
        values: content of sentence_bert_config.json.

    Raises:
        ValueError: the value is not a number of tokens.
    """
    length = values.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(
            f"max_seq_length is {format_value(length)}; it must be a whole number, "
            "1 or more; fix the value or leave it out"
        )
    return length
