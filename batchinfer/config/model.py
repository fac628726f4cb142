"""Settings of the model to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from batchinfer.config.types import Record, coerce_fields

Runner = Literal["generate", "pooling", "whole_texts"]
"""Purpose of a model, as in vLLM. generate: text; pooling: hidden states; whole_texts: hidden
states of all tokens of a text, which is computed in one step without a KV pool."""


@dataclass(frozen=True)
class ModelConfig(Record):
    """Settings of a model, with the keys of the job file's section ``model``."""

    name: str
    """Hub id or local directory."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """Hub id or local directory; None: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the checkpoint's."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: the model's limit."""
    quantization: str | None = None
    """One of ``QUANTIZATIONS``; None: the checkpoint's."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folder or hub id of each LoRA adapter by name. Requests use their numbers, in this order from
    1."""
    runner: Runner = "generate"
    """pooling: the model may have no output head."""

    @property
    def pools(self) -> bool:
        """True if the model is run for hidden states."""
        return self.runner in ("pooling", "whole_texts")

    def __post_init__(self) -> None:
        coerce_fields(self)
        length = self.max_model_len
        self._require("max_model_len", length is None or length >= 1, "1 or more")
