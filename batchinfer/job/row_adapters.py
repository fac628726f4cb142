"""A row's own adapter, from the input column that ``prompt.adapter_column`` names."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.errors import RowError
from batchinfer.job.messages import did_you_mean, printable

BASE = 0
"""Number of the base model, without an adapter."""


class RowAdapters:
    """Names of adapters to their numbers.

    Args:
        column: holds names, null where the base model is to run alone; None: it always is.
        numbers: of the adapters, by name.
    """

    def __init__(self, column: str | None = None, numbers: Mapping[str, int] | None = None) -> None:
        self.column = column
        self._numbers = numbers or {}

    def of(self, row: Mapping[str, object]) -> int | RowError:
        """The number of a row's adapter. Error codes: ``unknown_adapter``, ``invalid_utf8``."""
        value = None if self.column is None else row.get(self.column)
        if value is None or isinstance(value, RowError):
            return BASE if value is None else value
        try:
            name = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            return RowError("invalid_utf8", f"column {self.column}: {error}")
        number = self._numbers.get(name)
        if number is None:
            known = did_you_mean(name, tuple(self._numbers))
            text = f"column {self.column}: there is no adapter {printable(name, 60)!r}{known}"
            return RowError("unknown_adapter", printable(text))
        return number
