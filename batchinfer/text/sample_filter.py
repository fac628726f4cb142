"""Verdicts on finished samples: which ones pass, and which of those are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from batchinfer.config import AcceptConfig
from batchinfer.config.regex import has_match
from batchinfer.text.structured.json_validator import JsonValidator, SchemaError


class AcceptError(ValueError):
    """An ``accept`` section that cannot be used; says why in one line."""


class Verdict(Enum):
    """Verdict on a sample."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    SURPLUS = "surplus"
    """Not checked, because enough samples are kept already."""


@dataclass
class RowVerdicts:
    """Verdicts on a row's samples, in order."""

    wanted: int
    verdicts: list[Verdict] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    def count(self, verdict: Verdict) -> int:
        """Count the samples with a verdict."""
        return self.verdicts.count(verdict)

    @property
    def is_full(self) -> bool:
        """Whether enough samples are kept."""
        return self.count(Verdict.ACCEPTED) >= self.wanted


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a row's samples by verdict; zeros if the job judges none."""

    samples_tried: int = 0
    """The sum of the others."""
    samples_accepted: int = 0
    samples_rejected: int = 0
    samples_duplicate: int = 0
    """Passed, but has the text of a kept sample."""
    samples_surplus: int = 0
    """Drawn after the last kept sample, in the same step."""


class Judge:
    """Judges samples by the rules of ``accept``.

    Raises:
        AcceptError: the schema is invalid, or its package is not installed.
    """

    def __init__(self, config: AcceptConfig) -> None:
        self._config = config
        try:
            self._validator = None if config.schema is None else JsonValidator(str(config.schema))
        except SchemaError as error:
            raise AcceptError(str(error)) from None

    def judge(self, row: RowVerdicts, samples: Iterable[tuple[str, int, bool]]) -> None:
        """Add the verdicts on a row's next samples.

        Args:
            samples: in order: text, number of tokens, and whether the text meets the row's own
                parameters.
        """
        for text, num_tokens, as_asked in samples:
            row.verdicts.append(self._verdict(text, num_tokens, as_asked, row))

    def _verdict(self, text: str, num_tokens: int, as_asked: bool, row: RowVerdicts) -> Verdict:
        if row.is_full:
            return Verdict.SURPLUS
        if not as_asked or not self._passes(text, num_tokens):
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
