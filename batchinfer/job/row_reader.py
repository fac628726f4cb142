"""From a row of the dataset to what the engine needs of it: a prompt and how to sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from batchinfer.errors import RowError
from batchinfer.job.input.format import SAMPLING_COLUMN, Row
from batchinfer.job.row_adapters import RowAdapters
from batchinfer.job.row_params import RowParams, RowSampling
from batchinfer.text.prompts import Prompt

Read = tuple[Prompt, RowSampling | None, int] | RowError
"""Prompt, how it is sampled if it is, and number of its adapter; or why the row cannot run."""


class Prompts(Protocol):
    """Makes prompts of rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that ``build`` needs."""
        ...

    def build(self, rows: Sequence[Mapping[str, object]]) -> list[Prompt | RowError]:
        """A prompt or an error for each row, in order."""
        ...


class RowReader(Protocol):
    """Makes rows ready for the engine."""

    columns: tuple[str, ...]
    """The input columns it needs."""

    def read(self, rows: Sequence[Row]) -> list[Read]:
        """What the engine needs of each row, in order."""
        ...


class ColumnReader:
    """Rows whose prompts and parameters are in columns, as the job file says.

    Args:
        builder: makes the prompts.
        params: makes the sampling parameters; None: rows have none of their own.
        adapters: knows the rows' adapters.
        available: names of the data's columns.
    """

    def __init__(
        self,
        builder: Prompts,
        params: RowParams | None,
        adapters: RowAdapters,
        available: Sequence[str],
    ) -> None:
        own = [SAMPLING_COLUMN] if params is not None and SAMPLING_COLUMN in available else []
        if adapters.column is not None:
            own.append(adapters.column)
        self.columns = tuple(dict.fromkeys((*builder.columns, *own)))
        self._builder = builder
        self._params = params
        self._adapters = adapters

    def read(self, rows: Sequence[Row]) -> list[Read]:
        """See ``RowReader``."""
        good = [row for row in rows if not isinstance(row, RowError)]
        made = (
            ready(prompt, self._sampling(row), self._adapters.of(row))
            for row, prompt in zip(good, self._builder.build(good), strict=True)
        )
        return [row if isinstance(row, RowError) else next(made) for row in rows]

    def _sampling(self, row: Mapping[str, object]) -> RowSampling | RowError | None:
        return None if self._params is None else self._params.of(row.get(SAMPLING_COLUMN))


def ready(
    prompt: Prompt | RowError, sampling: RowSampling | RowError | None, adapter: int | RowError
) -> Read:
    """All of a row, or the first that is an error."""
    if isinstance(prompt, RowError):
        return prompt
    if isinstance(sampling, RowError):
        return sampling
    return adapter if isinstance(adapter, RowError) else (prompt, sampling, adapter)
