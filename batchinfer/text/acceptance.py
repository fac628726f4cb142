"""Judges finished samples: which of them pass, and which of those are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from batchinfer.config import AcceptConfig


class AcceptError(ValueError):
    """What is to be accepted cannot be judged: why, in a line."""


class Verdict(Enum):
    """What becomes of a sample."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    SURPLUS = "surplus"
    """Enough are kept already; it is not looked at."""


@dataclass
class RowVerdicts:
    """The verdicts on a row's samples, in order."""

    wanted: int
    verdicts: list[Verdict] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    def count(self, verdict: Verdict) -> int:
        """Samples that it was passed on."""
        return self.verdicts.count(verdict)

    @property
    def is_full(self) -> bool:
        """Whether as many are kept as are wanted."""
        return self.count(Verdict.ACCEPTED) >= self.wanted


class Judge:
    """Judges samples as ``accept`` says.

    Raises:
        AcceptError: the schema is none, or its package is not installed.
    """

    def __init__(self, config: AcceptConfig) -> None:
        self._config = config
        self._regex = None if config.regex is None else re.compile(config.regex)
        self._validator = None if config.schema is None else _validator(str(config.schema))

    def judge(self, samples: Iterable[tuple[str, int]], wanted: int) -> RowVerdicts:
        """Judge a row's samples.

        Args:
            samples: text and number of tokens of each, in the order of their indices.
            wanted: how many to keep.
        """
        row = RowVerdicts(wanted)
        for text, num_tokens in samples:
            row.verdicts.append(self._verdict(text, num_tokens, row))
        return row

    def _verdict(self, text: str, num_tokens: int, row: RowVerdicts) -> Verdict:
        if row.is_full:
            return Verdict.SURPLUS
        if not self._passes(text, num_tokens):
            return Verdict.REJECTED
        if self._config.dedup and text in row.texts:
            return Verdict.DUPLICATE
        row.texts.add(text)
        return Verdict.ACCEPTED

    def _passes(self, text: str, num_tokens: int) -> bool:
        if num_tokens < self._config.min_tokens:
            return False
        if self._regex is not None and self._regex.search(text) is None:
            return False
        if self._validator is None:
            return True
        try:
            return bool(self._validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return False


def _validator(schema: str) -> Any:
    try:
        import jsonschema
        from jsonschema.validators import validator_for
    except ImportError:
        raise AcceptError(
            "schema needs the package jsonschema: pip install 'batchinfer[structured]'"
        ) from None
    loaded = json.loads(schema)
    kind = validator_for(loaded, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(loaded)
    except jsonschema.SchemaError as error:
        raise AcceptError(f"schema is wrong: {error.message}") from None
    except (RecursionError, re.error) as error:
        raise AcceptError(f"schema is wrong: {error or 'it is nested too deeply'}") from None
    return kind(loaded)
