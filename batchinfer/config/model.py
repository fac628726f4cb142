"""Settings of the model to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from batchinfer.config.types import Record, coerce_fields

Runner = Literal["generate", "pooling", "whole_texts"]
"""Purpose of a model, as in vLLM. generate: text; pooling: hidden states; whole_texts: hidden
states of all tokens of a text, computed in one step without a KV cache.
"""


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
    """Most tokens of prompt and output together; None for the model's limit."""
    quantization: str | None = None
    """A value of ``QUANTIZATIONS``; None for the checkpoint's quantization."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folder or hub id of each LoRA adapter by name. Requests use the number of an adapter, which
    counts from 1 in this order.
    """
    runner: Runner = "generate"
    """Purpose of the model; with pooling, it may lack an output head."""

    @property
    def pools(self) -> bool:
        """True if the model runs for hidden states."""
        return self.runner in ("pooling", "whole_texts")

    def __post_init__(self) -> None:
        coerce_fields(self)
        length = self.max_model_len
        self._require("max_model_len", length is None or length >= 1, "1 or more")
