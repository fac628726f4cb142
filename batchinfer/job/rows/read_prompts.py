"""The dataset's rows as prompts, in input order, a batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

from batchinfer.errors import DataError
from batchinfer.job.input.format import Row
from batchinfer.job.rows.reader import RowReader
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.requests import PromptRow

InFlight = Callable[[Sequence[int]], AbstractContextManager[None]]

_BATCHES_AHEAD = 1
"""Batches whose prompts are made while those before them are waited for."""


_Prompts = Iterator[list[PromptRow]]


def read_prompts(
    batches: Iterator[tuple[list[int], list[Row]]],
    reader: RowReader,
    in_flight: InFlight = lambda row_ids: nullcontext(),
    *,
    keeps_text: bool = True,
) -> Iterator[list[PromptRow]]:
    """Prompts of rows, a batch at a time.

    Args:
        batches: row ids and rows, with the columns that ``reader`` needs (``Source.batches``).
        in_flight: entered with the rows of each batch while their prompts are made.
        keeps_text: whether the text of prompts is needed, which takes memory until a row is done.
    """
    started: deque[_Prompts] = deque()
    try:
        for row_ids, rows in batches:
            started.append(_prompts(row_ids, rows, reader, in_flight, keeps_text))
            next(started[-1])
            if len(started) > _BATCHES_AHEAD:
                yield from started.popleft()
    except DataError:  # the rows before the place that cannot be read are not lost with it
        yield from chain.from_iterable(started)
        raise
    yield from chain.from_iterable(started)


def _prompts(
    row_ids: list[int], rows: list[Row], reader: RowReader, in_flight: InFlight, keeps_text: bool
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
    if not keeps_text:
        for row in batch:
            row.drop_text()
    yield batch
