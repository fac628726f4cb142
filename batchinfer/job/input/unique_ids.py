"""Finds rows without an id, and rows that repeat the id of an earlier row."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.console.format import format_value
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import Rows
from batchinfer.job.input.invalid_utf8 import python_values, with_valid_text
from batchinfer.job.row_ranges import RowIds, in_range

if TYPE_CHECKING:
    from batchinfer.job.input.dataset import Source

HASHES_AT_ONCE = 1 << 24
"""Maximum number of hashes in memory, at 8 bytes each. A dataset with more rows is read several
times.
"""
NO_ID = -1
"""Value in ``BadIds.firsts`` for a row without an id."""


@dataclass(frozen=True, eq=False)
class BadIds:
    """Rows with a missing or duplicate id; each takes 16 bytes."""

    column: str
    rows: RowIds
    firsts: npt.NDArray[np.int64]
    """For each of ``rows``, the first row with the same id, or ``NO_ID``."""

    def __len__(self) -> int:
        return len(self.rows)

    def error(self, at: int) -> RowError:
        """Make the error for the row ``rows[at]``: missing_id or duplicate_id."""
        name, first = format_value(self.column), int(self.firsts[at])
        if first == NO_ID:
            return RowError("missing_id", f"input.id_column: the row has no value in {name}")
        return RowError(
            "duplicate_id", f"input.id_column: row {first} has the same value in {name}"
        )

    def mark(self, piece: Rows) -> Rows:
        """Replace bad rows with their errors. A row that cannot be read keeps its earlier error."""
        first_row, rows = piece
        for row in in_range(self.rows, range(first_row, first_row + len(rows))).tolist():
            if not isinstance(rows[row - first_row], RowError):
                rows[row - first_row] = self.error(int(np.searchsorted(self.rows, row)))
        return piece


def find_bad_ids(source: Source, column: str) -> BadIds:
    """Find selected rows that have no id or repeat the id of an earlier selected row.

    Null and NaN are not ids. The function sorts 64-bit hashes of the values, then compares the few
    values with equal hashes. The result is the same in every process, although Python's hashes of
    strings differ between processes.

    Raises:
        DataError: the column holds lists or structs.
    """
    num_passes = max(1, -(-source.num_rows // HASHES_AT_ONCE))
    found: dict[int, int] = {}
    for number in range(num_passes):
        seen = [np.empty(0, np.int64)]
        for first_row, values, hashes in _ids(source, column):
            seen.append(hashes[hashes % num_passes == number])
            if number == 0:
                rows = enumerate(values, first_row)
                found |= {row: NO_ID for row, value in rows if not _is_id(value)}
        all_hashes = np.sort(np.concatenate(seen))
        repeated = np.unique(all_hashes[1:][all_hashes[1:] == all_hashes[:-1]])
        found |= _duplicates(source, column, repeated) if len(repeated) else {}
    bad_rows = np.array(sorted(found), dtype=np.int64)
    firsts = np.fromiter((found[row] for row in bad_rows.tolist()), np.int64, len(bad_rows))
    return BadIds(column, bad_rows, firsts)


def check_unique_ids(source: Source, column: str) -> None:
    """Raise DataError if a selected row has no value in ``column``, or if two rows have the same
    value."""
    bad = find_bad_ids(source, column)
    if len(bad):
        raise DataError(
            f"row {bad.rows[0]}: {bad.error(0).message}",
            hint="every row needs a unique id; correct the ids, or name another column",
        )


def _ids(
    source: Source, column: str
) -> Iterator[tuple[int, list[Hashable], npt.NDArray[np.int64]]]:
    """Yield the first row id of each batch, the batch's values, and their hashes."""
    kind = source.schema.field(column).type
    if pa.types.is_nested(kind):
        raise DataError(
            f"input.id_column: {format_value(column)} is a {kind} column; ids must "
            "be strings or numbers; name another column"
        )
    for first_row, batch in source.scan([column], [source.rows_there]):
        values = python_values(with_valid_text(batch.column(0)))  # as in the output
        yield first_row, values, np.fromiter(map(hash, values), np.int64, len(values))


def _is_id(value: object) -> bool:
    return value is not None and value == value  # false for NaN, which is not equal to itself


def _duplicates(source: Source, column: str, repeated: npt.NDArray[np.int64]) -> dict[int, int]:
    """Map each row with a duplicate id to the id's first row; ``repeated`` has the ids' hashes."""
    firsts: dict[int, int] = {}
    first_rows: dict[Hashable, int] = {}
    for first_row, values, hashes in _ids(source, column):
        for at in np.flatnonzero(np.isin(hashes, repeated)).tolist():
            value, row = values[at], first_row + at
            if _is_id(value) and (first := first_rows.setdefault(value, row)) != row:
                firsts[row] = first
    return firsts
