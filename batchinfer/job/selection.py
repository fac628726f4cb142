"""The rows that ``input.filter`` selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import pyarrow as pa

from batchinfer.job.condition import Condition
from batchinfer.job.input_format import BATCH_ROWS, Row
from batchinfer.job.row_ids import NO_ROWS, RowIds, ranges_of

_Piece = TypeVar("_Piece", pa.RecordBatch, list[Row])


class Selection:
    """Some of a dataset's rows; a row keeps the id that it has in the whole.

    Args:
        row_ids: of the rows, sorted: 8 bytes each are kept.
    """

    def __init__(self, row_ids: RowIds) -> None:
        self._row_ids = row_ids

    def __len__(self) -> int:
        return len(self._row_ids)

    def count(self, rows: range) -> int:
        """How many of ``rows`` are selected."""
        return len(self._of(rows))

    def bounds(self, rows_per_part: int) -> tuple[int, ...]:
        """The first row of each part, and where the last one ends."""
        if not len(self):
            return 0, 0
        return *self._row_ids[::rows_per_part].tolist(), int(self._row_ids[-1]) + 1

    def near(self, ranges: Iterable[range]) -> Iterator[range]:
        """What to read of ``ranges``: without the long stretches where nothing is selected."""
        for rows in ranges:
            yield from ranges_of(self._of(rows), BATCH_ROWS)

    def of_piece(self, first_row: int, piece: _Piece) -> Iterator[tuple[int, _Piece]]:
        """The selected rows of a piece of the dataset: runs of them, and the first one's id."""
        for rows in ranges_of(self._of(range(first_row, first_row + len(piece)))):
            yield rows.start, piece[rows.start - first_row : rows.stop - first_row]

    def _of(self, rows: range) -> RowIds:
        first, stop = np.searchsorted(self._row_ids, (rows.start, rows.stop))
        return self._row_ids[first:stop]


def select_rows(
    condition: Condition, pieces: Iterable[tuple[int, pa.RecordBatch]], limit: int | None
) -> Selection:
    """The rows that meet a condition; no more is read than that takes.

    Args:
        condition: ``input.filter``.
        pieces: the condition's columns of the whole dataset, each with its first row's id.
        limit: the first so many; None: all.

    Raises:
        UsageError: the condition is wrong for this data.
    """
    found, num_rows = [NO_ROWS], 0
    for first_row, batch in pieces:
        found.append(first_row + np.flatnonzero(condition.holds(batch)))
        num_rows += len(found[-1])
        if limit is not None and num_rows >= limit:
            break
    return Selection(np.concatenate(found)[:limit])
