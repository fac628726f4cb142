"""Sets of rows: sorted row ids, the ranges they make up, and the parts they fall into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

RowIds = npt.NDArray[np.int64]
"""Row ids, sorted, each once."""

NO_ROWS: RowIds = np.array([], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the output, and the rows of the input it answers."""

    index: int
    rows: range
    """Its row ids, and where a filter is, those between them."""
    selected: int | None = None
    """Rows of these that a filter selects; None: there is none."""

    @property
    def num_rows(self) -> int:
        """Rows it has when it is finished."""
        return len(self.rows) if self.selected is None else self.selected

    @property
    def name(self) -> str:
        """Name of the part's file, without its suffix."""
        return f"part-{self.index:05d}"


def sorted_row_ids(row_ids: Iterable[int]) -> RowIds:
    """Row ids in any order as a set."""
    return np.unique(np.fromiter(row_ids, dtype=np.int64))


def ranges_of(row_ids: RowIds, most_apart: int = 1) -> list[range]:
    """The ranges that ``row_ids`` make up, in order; in one, they are at most so far apart."""
    if not len(row_ids):
        return []
    runs = np.split(row_ids, np.flatnonzero(np.diff(row_ids) > most_apart) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def in_range(row_ids: RowIds, rows: range) -> RowIds:
    """Row ids in a range."""
    first, stop = np.searchsorted(row_ids, (rows.start, rows.stop))
    return row_ids[first:stop]


def ranges_in(parts: Sequence[Part], row_ids: RowIds) -> list[range]:
    """Row ids of some parts as ranges in order, each of one part."""
    return [rows for part in parts for rows in ranges_of(in_range(row_ids, part.rows))]


def missing_ranges(parts: Sequence[Part], there: RowIds) -> list[range]:
    """Rows of ``parts`` that are not ``there``: ranges in order, each of one part.

    Rows that are not selected may be in them.
    """
    ranges: list[range] = []
    for part in parts:
        found = in_range(there, part.rows)
        if not len(found):
            ranges.append(part.rows)
        elif len(found) < part.num_rows:
            known = [part.rows.start - 1, *found.tolist(), part.rows.stop]
            ranges += [range(a + 1, b) for a, b in pairwise(known) if b - a > 1]
    return ranges


def within(row_ids: RowIds, ranges: Sequence[range]) -> RowIds:
    """Row ids that are in one of ``ranges``, which are in order."""
    if not ranges:
        return NO_ROWS
    starts, stops = (np.array([getattr(r, end) for r in ranges]) for end in ("start", "stop"))
    at = np.searchsorted(starts, row_ids, side="right") - 1
    inside: RowIds = row_ids[(at >= 0) & (row_ids < stops[at])]
    return inside
