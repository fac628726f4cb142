"""Represents sets of rows as sorted row ids, as ranges, and as parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

RowIds = npt.NDArray[np.int64]
"""Row ids, sorted and unique."""

NO_ROWS: RowIds = np.array([], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Part:
    """An output file, and the range of input rows that it covers."""

    index: int
    rows: range
    """Range of row ids from the first to the last row; a filter may exclude some of them."""
    selected: int | None = None
    """Number of rows that the filter selects; None without a filter."""

    @property
    def num_rows(self) -> int:
        """Number of rows that the part has once it is finished."""
        return len(self.rows) if self.selected is None else self.selected

    @property
    def name(self) -> str:
        return f"part-{self.index:05d}"


def sorted_row_ids(row_ids: Iterable[int]) -> RowIds:
    return np.unique(np.fromiter(row_ids, dtype=np.int64))


def ranges_of(row_ids: RowIds, most_apart: int = 1) -> list[range]:
    """Group row ids into ordered ranges; ids at most ``most_apart`` apart share a range."""
    if not len(row_ids):
        return []
    runs = np.split(row_ids, np.flatnonzero(np.diff(row_ids) > most_apart) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def in_range(row_ids: RowIds, rows: range) -> RowIds:
    first, stop = np.searchsorted(row_ids, (rows.start, rows.stop))
    return row_ids[first:stop]


def ranges_in(parts: Sequence[Part], row_ids: RowIds) -> list[range]:
    """Group row ids into ordered ranges that each lie within one of ``parts``."""
    return [rows for part in parts for rows in ranges_of(in_range(row_ids, part.rows))]


def missing_ranges(parts: Sequence[Part], finished: RowIds) -> list[range]:
    """Return the unfinished rows of parts as ordered ranges, each within one part.

    The ranges may hold rows that the filter does not select.
    """
    ranges: list[range] = []
    for part in parts:
        of_part = in_range(finished, part.rows)
        if not len(of_part):
            ranges.append(part.rows)
        elif len(of_part) < part.num_rows:
            known = [part.rows.start - 1, *of_part.tolist(), part.rows.stop]
            ranges += [range(a + 1, b) for a, b in pairwise(known) if b - a > 1]
    return ranges


def within(row_ids: RowIds, ranges: Sequence[range]) -> RowIds:
    """Return the row ids that lie in one of ``ranges``, which must be in order."""
    if not ranges:
        return NO_ROWS
    starts, stops = (np.array([getattr(r, end) for r in ranges]) for end in ("start", "stop"))
    at = np.searchsorted(starts, row_ids, side="right") - 1
    inside: RowIds = row_ids[(at >= 0) & (row_ids < stops[at])]
    return inside
