"""Checks the arguments that an ``LLM`` is made from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinfer.config import EngineConfig, field_names
from batchinfer.errors import NotYetError
from batchinfer.typed import take_types

_NOT_YET: Mapping[str, object] = {
    "quantization": None,
    "adapters": {},
    "trust_remote_code": False,
    "preset": None,
}
"""Arguments that job files know and ``LLM`` does not build, with their defaults."""


@dataclass(frozen=True)
class ModelArguments:
    """Which model to load, and how.

    Raises:
        TypeError: naming the argument, when it is of another type.
        ValueError: ``max_model_len`` is not positive.
    """

    model: str
    tokenizer: str | None
    revision: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    max_model_len: int | None

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        take_types(self)
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be 1 or more")

    @property
    def name(self) -> str:
        """The model's hub id or local directory."""
        return self.model


def engine_config(keys: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration, from arguments that may be unknown or not built yet.

    Raises:
        NotYetError: job files know the argument, ``LLM`` does not build it.
        TypeError, ValueError: it is unknown, of another type or out of range.
    """
    known = field_names(EngineConfig)
    for name, value in keys.items():
        if name in _NOT_YET and value != _NOT_YET[name]:
            raise NotYetError(f"LLM({name}=...)")
        if name not in known and name not in _NOT_YET:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"engine keys: {', '.join(known)}"
            raise TypeError(f"LLM has no argument {name}; {hint}")
    return EngineConfig(**{name: value for name, value in keys.items() if name in known})
