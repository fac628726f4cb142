"""Decides which finished samples pass the rules of ``accept``, and which samples to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from batchinfer.config import AcceptConfig
from batchinfer.config.regex import has_match
from batchinfer.text.structured.json_validator import JsonValidator, SchemaError


class AcceptError(ValueError):
    """An ``accept`` section that cannot be used; the message gives the reason on one line."""


class Verdict(Enum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    SURPLUS = "surplus"
    """The sample was not checked, because enough samples are kept already."""


@dataclass
class RowVerdicts:
    """Verdicts on a row's samples, in order."""

    wanted: int
    verdicts: list[Verdict] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    def count(self, verdict: Verdict) -> int:
        return self.verdicts.count(verdict)

    @property
    def is_full(self) -> bool:
        return self.count(Verdict.ACCEPTED) >= self.wanted


@dataclass(frozen=True, slots=True)
class Tally:
    """How many of a row's samples got each verdict; all 0 if the job judges no samples."""

    samples_tried: int = 0
    """Sum of the other fields."""
    samples_accepted: int = 0
    samples_rejected: int = 0
    samples_duplicate: int = 0
    """Samples that pass, but repeat the text of a kept sample."""
    samples_surplus: int = 0
    """Samples that were not checked, because enough samples were kept already."""


class SampleFilter:
    """Decides which samples to keep, by the rules of ``accept``.

    Raises:
        AcceptError: the schema is invalid, or its package is not installed.
    """

    def __init__(self, config: AcceptConfig) -> None:
        self._config = config
        try:
            self._validator = None if config.schema is None else JsonValidator(str(config.schema))
        except SchemaError as error:
            raise AcceptError(str(error)) from None

    def apply(self, row: RowVerdicts, samples: Iterable[tuple[str, int, bool]]) -> None:
        """Add the verdicts on a row's next samples.

        Args:
            samples: samples in order, each with its text, its number of tokens, and True if the
                row's own schema allows the text.
        """
        for text, num_tokens, follows_params in samples:
            row.verdicts.append(self._verdict(text, num_tokens, follows_params, row))

    def _verdict(
        self, text: str, num_tokens: int, follows_params: bool, row: RowVerdicts
    ) -> Verdict:
        if row.is_full:
            return Verdict.SURPLUS
        if not follows_params or not self._passes(text, num_tokens):
            return Verdict.REJECTED
        if self._config.dedup and text in row.texts:
            return Verdict.DUPLICATE
        row.texts.add(text)
        return Verdict.ACCEPTED

    def _passes(self, text: str, num_tokens: int) -> bool:
        if num_tokens < self._config.min_tokens:
            return False
        if self._config.regex is not None and not has_match(self._config.regex, text):
            return False
        return self._validator is None or self._validator.allows(text)
