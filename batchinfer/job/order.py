"""From the dataset to prompts, in input order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from pyarrow import RecordBatch

from batchinfer.errors import RowError
from batchinfer.job.columns import python_rows
from batchinfer.job.failpoints import failpoint
from batchinfer.job.manifest import Part
from batchinfer.job.row_adapters import BASE, RowAdapters
from batchinfer.job.row_params import COLUMN, RowParams, RowSampling
from batchinfer.job.source import BATCH_ROWS, Source
from batchinfer.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of the input, ready for the engine, or why it can never be."""

    row_id: int
    prompt: Prompt | RowError
    sampling: RowSampling | None = None
    """None for a row that cannot run, or that draws nothing."""
    shared_later: int = 0
    """Prompt tokens that a row after it, in the order they run, begins with as well."""
    distinct_tokens: int = 0
    """Prompt tokens after the longest prefix that it has in common with a row before it, and those
    given after the prompt."""
    adapter: int = BASE
    """Number of the adapter it runs through."""


class Prompts(Protocol):
    """Makes prompts of rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that ``build`` needs."""
        ...

    def build(self, rows: Sequence[Mapping[str, object]]) -> list[Prompt | RowError]:
        """A prompt or an error for each row, in order."""
        ...


def prompt_rows(
    source: Source,
    parts: Sequence[Part],
    builder: Prompts,
    params: RowParams | None,
    adapters: RowAdapters,
    ranges: Iterable[range] | None = None,
    making: Callable[[Sequence[int]], AbstractContextManager[None]] = lambda row_ids: nullcontext(),
) -> Iterator[list[PromptRow]]:
    """Prompts of the rows of ``parts``, in input order, a batch of one part's rows at a time.

    Args:
        source: the dataset.
        parts: parts that hold the rows, in order.
        builder: makes the prompts.
        params: makes the rows' sampling parameters; None: rows have none of their own.
        adapters: knows the rows' adapters.
        ranges: only these rows, in order, each range in one part; None: all.
        making: entered with the rows of each batch while their prompts are made.
    """
    columns = [*builder.columns]
    if params is not None and COLUMN in source.schema.names and COLUMN not in columns:
        columns.append(COLUMN)
    if adapters.column is not None and adapters.column not in columns:
        columns.append(adapters.column)
    wanted = [part.rows for part in parts] if ranges is None else list(ranges)
    first_rows = [part.rows.start for part in parts]
    pieces = source.scan(columns, wanted)
    for _, of_part in groupby(wanted, key=lambda rows: bisect_right(first_rows, rows.start)):
        missing = sum(map(len, of_part))
        while missing:
            row_ids, rows = _batch(pieces, min(missing, BATCH_ROWS))
            missing -= len(rows)
            with making(row_ids):
                for row_id in row_ids:
                    failpoint(f"prompt-{row_id}")
                prompts = builder.build(rows)
            yield [
                _prompt_row(
                    row_id,
                    prompt,
                    None if params is None else params.of(row.get(COLUMN)),
                    adapters.of(row),
                )
                for row_id, row, prompt in zip(row_ids, rows, prompts, strict=True)
            ]


def _batch(
    pieces: Iterator[tuple[int, RecordBatch]], num_rows: int
) -> tuple[list[int], list[dict[str, Any]]]:
    """Row ids and rows of ``num_rows`` or more: prompts of scattered rows are built together."""
    row_ids: list[int] = []
    rows: list[dict[str, Any]] = []
    while len(rows) < num_rows:
        first_row, piece = next(pieces)
        row_ids.extend(range(first_row, first_row + piece.num_rows))
        rows.extend(python_rows(piece))
    return row_ids, rows


def _prompt_row(
    row_id: int,
    prompt: Prompt | RowError,
    sampling: RowSampling | RowError | None,
    adapter: int | RowError,
) -> PromptRow:
    if isinstance(prompt, RowError):
        return PromptRow(row_id, prompt)
    if isinstance(sampling, RowError):
        return PromptRow(row_id, sampling)
    if isinstance(adapter, RowError):
        return PromptRow(row_id, adapter)
    return PromptRow(row_id, prompt, sampling, adapter=adapter)


def without_text(batches: Iterator[list[PromptRow]]) -> Iterator[list[PromptRow]]:
    """Drop the prompts' text, which else stays in memory until its row is finished."""
    for rows in batches:
        yield [
            row
            if isinstance(row.prompt, RowError)
            else replace(row, prompt=replace(row.prompt, text=None))
            for row in rows
        ]
