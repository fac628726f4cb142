"""Options of ``batchinfer run-batch``, read before anything heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchinfer.errors import UsageError


@dataclass(frozen=True)
class BatchOptions:
    """Options of ``run-batch`` as keys of a job file; None: the job file's default."""

    input_file: str
    output_file: str
    model: str
    served_model_name: Sequence[str] = ()
    max_tokens: int | None = None
    """Limit of requests that give none."""
    model_keys: Mapping[str, Any] = field(default_factory=dict)
    prompt_keys: Mapping[str, Any] = field(default_factory=dict)
    sampling_keys: Mapping[str, Any] = field(default_factory=dict)
    engine_keys: Mapping[str, Any] = field(default_factory=dict)


def state_directory(output_file: str) -> Path:
    """The output directory of the job behind ``output_file``."""
    return Path(output_file + ".batchinfer")


def json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """The object that an option gives as JSON.

    Raises:
        UsageError: it is none.
    """
    try:
        value = None if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}") from None
    if value is not None and not isinstance(value, dict):
        raise UsageError(f'{option} must be an object, like {{"enable_thinking": false}}')
    return value
