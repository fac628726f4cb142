"""Verdicts on finished samples: which of them pass, and which of those are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Any

from batchinfer.config import AcceptConfig
from batchinfer.config.regex import has_match

MAX_BACKTRACKS = 1_000_000
"""Steps back that a pattern of a schema may take in a text."""


class AcceptError(ValueError):
    """An ``accept`` section that cannot be judged by: why, in a line."""


class Verdict(Enum):
    """Verdict on a sample."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    SURPLUS = "surplus"
    """Enough are kept already; it is not looked at."""


@dataclass
class RowVerdicts:
    """Verdicts on a row's samples, in order."""

    wanted: int
    verdicts: list[Verdict] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    def count(self, verdict: Verdict) -> int:
        """Number of samples with a verdict."""
        return self.verdicts.count(verdict)

    @property
    def is_full(self) -> bool:
        """Whether as many are kept as are wanted."""
        return self.count(Verdict.ACCEPTED) >= self.wanted


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a row's samples by verdict; zeros without ``accept``."""

    samples_tried: int = 0
    """The sum of the others."""
    samples_accepted: int = 0
    samples_rejected: int = 0
    samples_duplicate: int = 0
    """Passed, with the text of one that was kept."""
    samples_surplus: int = 0
    """Drawn beside the last that was kept, after it."""


class Judge:
    """Judge of samples by the rules of ``accept``.

    Raises:
        AcceptError: the schema is none, or its package is not installed.
    """

    def __init__(self, config: AcceptConfig) -> None:
        self._config = config
        self._has_match = None
        if config.regex is not None:  # remembered: a sample is judged again with those after it
            self._has_match = lru_cache(maxsize=1024)(partial(has_match, config.regex))
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
        if self._has_match is not None and not self._has_match(text):
            return False
        if self._validator is None:
            return True
        try:
            value = json.loads(text, parse_constant=_no_json, parse_float=_number)
            return bool(self._validator.is_valid(value))
        except (ValueError, RecursionError):
            return False


def _no_json(constant: str) -> Any:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{constant} is no JSON")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


def _validator(schema: str) -> Any:
    """Patterns in it are ECMAScript's, matched in linear time where they allow that, else with a
    bound on the work; nothing is fetched."""
    try:
        import jsonschema_rs
    except ImportError:
        raise AcceptError(
            "schema needs the package jsonschema-rs: pip install 'batchinfer[structured]'"
        ) from None
    options = jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS)
    try:
        return jsonschema_rs.validator_for(
            json.loads(schema), offline=True, validate_formats=False, pattern_options=options
        )
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise AcceptError(f"schema is wrong: {error.message}") from None
    except (ValueError, RecursionError) as error:
        raise AcceptError(f"schema is wrong: {error or 'it is nested too deeply'}") from None
