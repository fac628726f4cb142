"""The id column: rows whose id is missing, or that of an earlier row, are row errors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.console.format import format_value
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.arrow_text import python_values
from batchinfer.job.input.format import Rows
from batchinfer.job.row_ids import RowIds, in_range

if TYPE_CHECKING:
    from batchinfer.job.input.dataset import Source

HASHES_AT_ONCE = 1 << 24
"""Hashes held at a time (8 bytes each); a longer dataset is read once for each so many rows."""

NO_ID = -1
"""In place of the row with the same id, where a row has none."""


@dataclass(frozen=True, eq=False)
class BadIds:
    """Rows that the id column tells apart from no other; 16 bytes each."""

    column: str
    rows: RowIds
    firsts: npt.NDArray[np.int64]
    """Of each of ``rows``: the first row with its id, or ``NO_ID``."""

    def __len__(self) -> int:
        return len(self.rows)

    def error(self, at: int) -> RowError:
        """Why the row at a place of ``rows`` is not run: ``missing_id`` or ``duplicate_id``."""
        name, first = format_value(self.column), int(self.firsts[at])
        if first == NO_ID:
            return RowError("missing_id", f"input.id_column: the row has no {name}")
        return RowError("duplicate_id", f"input.id_column: row {first} has the same {name}")

    def mark(self, piece: Rows) -> Rows:
        """Rows with those of ``self`` as their errors; one that cannot be read stays as it is."""
        first_row, rows = piece
        for row in in_range(self.rows, range(first_row, first_row + len(rows))).tolist():
            if not isinstance(rows[row - first_row], RowError):
                rows[row - first_row] = self.error(int(np.searchsorted(self.rows, row)))
        return piece


@dataclass(frozen=True, slots=True)
class _Ids:
    """Some rows that follow each other."""

    first_row: int
    values: list[Hashable]
    """None and NaN are no ids."""

    def hashes(self) -> npt.NDArray[np.int64]:
        """Of each row's value."""
        return np.fromiter(map(hash, self.values), np.int64, len(self.values))

    def missing(self) -> list[int]:
        """Rows without an id."""
        none = np.array([value is None or value != value for value in self.values], dtype=bool)
        return (self.first_row + np.flatnonzero(none)).tolist()  # NaN is not itself


def find_bad_ids(source: Source, column: str) -> BadIds:
    """The selected rows that have no id, or one that an earlier selected row has.

    Sorts 64-bit hashes of the values, then compares the few values whose hashes are equal: what is
    found is the same in every process. A null is no id, nor is NaN.

    Raises:
        DataError: the column holds lists or structs.
    """
    num_passes = max(1, -(-source.num_rows // HASHES_AT_ONCE))
    found: dict[int, int] = {}
    for number in range(num_passes):
        seen = [np.empty(0, np.int64)]
        for ids in _ids(source, column):
            hashes = ids.hashes()
            seen.append(hashes[hashes % num_passes == number])
            if number == 0:
                found |= dict.fromkeys(ids.missing(), NO_ID)
        repeated = _repeated(np.concatenate(seen))
        found |= _duplicates(source, column, repeated) if len(repeated) else {}
    rows = np.array(sorted(found), dtype=np.int64)
    firsts = np.fromiter((found[row] for row in rows.tolist()), np.int64, len(rows))
    return BadIds(column, rows, firsts)


def check_unique_ids(source: Source, column: str) -> None:
    """Check that ``column`` holds a different value in every selected row.

    Raises:
        DataError: naming a row without a value, or two rows that share one.
    """
    bad = find_bad_ids(source, column)
    if len(bad):
        raise DataError(
            f"row {bad.rows[0]}: {bad.error(0).message}",
            hint="ids must be unique; drop the duplicates or name another column",
        )


def _ids(source: Source, column: str) -> Iterator[_Ids]:
    kind = source.schema.field(column).type
    if pa.types.is_nested(kind):
        raise DataError(
            f"input.id_column: {format_value(column)} is a {kind} column; give every row a text or "
            "a number, or name another column"
        )
    for first_row, batch in source.scan([column], [source.rows_there]):
        yield _Ids(first_row, python_values(batch.column(0)))


def _repeated(hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def _duplicates(source: Source, column: str, repeated: npt.NDArray[np.int64]) -> dict[int, int]:
    """Rows that have the id of an earlier one, and that; among those with hashes that repeat."""
    found: dict[int, int] = {}
    first_rows: dict[Hashable, int] = {}
    for ids in _ids(source, column):
        for at in np.flatnonzero(np.isin(ids.hashes(), repeated)).tolist():
            value, row = ids.values[at], ids.first_row + at
            if (
                value is not None
                and value == value
                and (first := first_rows.setdefault(value, row)) != row
            ):
                found[row] = first
    return found
