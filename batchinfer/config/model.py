"""Which model is run, checked when it is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from batchinfer.config.types import Record, coerce_fields

Runner = Literal["generate", "pooling", "whole_texts"]
"""What a model is run for, as vLLM names it: to write text, or for its hidden states; whole_texts:
for those of all tokens of a text, which is then computed at once, without a KV pool."""


@dataclass(frozen=True)
class ModelConfig(Record):
    """Which model to load, and how: keys of the job file's ``model`` section."""

    name: str
    """Hub id or local directory."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """Hub id or local directory; None: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: as the weights are saved."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together, in tokens; None: what the model allows."""
    quantization: str | None = None
    """One of ``QUANTIZATIONS``; None: the weights stay as they are saved."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folder or hub id of LoRA adapters by name; rows run through them by number, in this order
    from 1."""
    runner: Runner = "generate"
    """pooling: a model without an output head will do."""

    @property
    def pools(self) -> bool:
        """Whether it is run for its hidden states."""
        return self.runner in ("pooling", "whole_texts")

    def __post_init__(self) -> None:
        coerce_fields(self)
        length = self.max_model_len
        self._require("max_model_len", length is None or length >= 1, "1 or more")
