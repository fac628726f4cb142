"""The dataset's rows as prompts, in input order, a batch at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, groupby

from batchinfer.errors import DataError
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.format import BATCH_ROWS, Row, Rows
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.reader import RowReader
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.requests import PromptRow

InFlight = Callable[[Sequence[int]], AbstractContextManager[None]]

_BATCHES_AHEAD = 1
"""Batches whose prompts are made while those before them are waited for."""


_Prompts = Iterator[list[PromptRow]]


def read_prompts(
    source: Source,
    parts: Sequence[Part],
    reader: RowReader,
    ranges: Iterable[range] | None = None,
    in_flight: InFlight = lambda row_ids: nullcontext(),
) -> Iterator[list[PromptRow]]:
    """Prompts of the rows of ``parts``, in input order, a batch of one part's rows at a time.

    Args:
        parts: parts that hold the rows, in order.
        ranges: only these rows, in order, each range in one part; None: all.
        in_flight: entered with the rows of each batch while their prompts are made.
    """
    started: deque[_Prompts] = deque()
    try:
        for row_ids, rows in _batches(source, parts, reader.columns, ranges):
            started.append(_prompts(row_ids, rows, reader, in_flight))
            next(started[-1])
            if len(started) > _BATCHES_AHEAD:
                yield from started.popleft()
    except DataError:  # the rows before the place that cannot be read are not lost with it
        yield from chain.from_iterable(started)
        raise
    yield from chain.from_iterable(started)


def _prompts(
    row_ids: list[int], rows: list[Row], reader: RowReader, in_flight: InFlight
) -> _Prompts:
    """Prompts of rows, in two steps.

    Yields:
        Nothing, once they are begun; then the rows.
    """
    with in_flight(row_ids):
        for row_id in row_ids:
            failpoint(f"prompt-{row_id}")
        finish = reader.start(row_ids, rows)
        yield []
        batch = finish()
    yield batch


def _batches(
    source: Source, parts: Sequence[Part], columns: Sequence[str], ranges: Iterable[range] | None
) -> Iterator[tuple[list[int], list[Row]]]:
    """Row ids and rows, a batch of one part's rows at a time."""
    ranges = [part.rows for part in parts] if ranges is None else list(ranges)
    first_rows = [part.rows.start for part in parts]
    pieces = source.rows(columns, ranges)
    for _, of_part in groupby(ranges, key=lambda rows: bisect_right(first_rows, rows.start)):
        missing = sum(map(source.count, of_part))
        while missing:
            row_ids, rows = _batch(pieces, min(missing, BATCH_ROWS))
            missing -= len(rows)
            yield row_ids, rows


def _batch(pieces: Iterator[Rows], num_rows: int) -> tuple[list[int], list[Row]]:
    """Row ids and rows of ``num_rows`` or more: prompts of scattered rows are built together."""
    row_ids: list[int] = []
    rows: list[Row] = []
    while len(rows) < num_rows:
        first_row, piece = next(pieces)
        row_ids.extend(range(first_row, first_row + len(piece)))
        rows.extend(piece)
    return row_ids, rows


def without_text(batches: Iterator[list[PromptRow]]) -> Iterator[list[PromptRow]]:
    """Rows without their prompts' text, which else stays in memory until they are finished."""
    for rows in batches:
        yield [row.without_text() for row in rows]
