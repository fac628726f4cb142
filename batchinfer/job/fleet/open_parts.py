"""The parts of a job that are not published: whose their rows are, and what of them is free.

A row is finished or *unleased*, set *aside* to run apart, or *held* by one lease. Something of a
part is free where it has unleased rows, and where all of its rows are finished and nobody has made
it. Free parts wait in a queue, lowest first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from batchinfer.job.fleet.lease import Ranges, count_rows, row_ids_of
from batchinfer.job.row_ids import Part, RowIds, in_range, ranges_of


def without_rows(ranges: Ranges, row_ids: RowIds) -> Ranges:
    """``ranges`` without some rows, all of which are in them."""
    return tuple(ranges_of(np.setdiff1d(row_ids_of(ranges), row_ids, assume_unique=True)))


def _with_rows(ranges: Ranges, row_ids: RowIds) -> Ranges:
    return tuple(ranges_of(np.union1d(row_ids_of(ranges), row_ids)))


@dataclass(slots=True)
class PartState:
    """A part that has been leased and is not published."""

    unleased: Ranges
    """Rows that are neither finished nor anybody's."""
    aside: Ranges = ()
    """Rows that are to run apart."""
    held: dict[int, Ranges] = field(default_factory=dict)
    """Rows of each lease, by its fence; finished ones are only forgotten with the lease."""
    maker: int | None = None
    """The lease that makes it."""
    is_drafted: bool = False

    @property
    def is_free(self) -> bool:
        """Whether there is something of it to lease: rows, or the making of it."""
        if self.is_drafted:
            return False
        return bool(self.unleased) or not (self.held or self.aside)


class OpenParts:
    """Parts by their index, each with a state from when it is first looked at until it is out.

    Args:
        parts: to make, in order.
        missing: of those of them that have finished rows already, the rows that are not; by index.
    """

    def __init__(self, parts: Sequence[Part], missing: Mapping[int, Ranges]) -> None:
        self._ordered = parts
        self._first_rows = [part.rows.start for part in parts]
        self._parts = {part.index: part for part in parts}
        self._missing = dict(missing)
        self._states: dict[int, PartState] = {}
        self._free = [part.index for part in parts]  # ascending, and so a heap
        self._queued = set(self._free)
        self._is_out: set[int] = set()
        self.rows_unleased = sum(count_rows(self._rows_at_first(index)) for index in self._free)
        """Rows that no worker has, and that are not finished."""

    @property
    def num_left(self) -> int:
        """Parts that are not published."""
        return len(self._parts) - len(self._is_out)

    @property
    def has_free(self) -> bool:
        """Whether something is free."""
        return bool(self._free)

    def __getitem__(self, index: int) -> PartState:
        assert index not in self._is_out, "nothing of a published part is left to do"
        if index not in self._states:
            self._states[index] = PartState(self._rows_at_first(index))
            self._missing.pop(index, None)
        return self._states[index]

    @property
    def states(self) -> list[PartState]:
        """Of all parts that have been looked at and are not published."""
        return list(self._states.values())

    def part(self, index: int) -> Part:
        """The part itself."""
        return self._parts[index]

    def is_open(self, index: int) -> bool:
        """Whether something of a part has been looked at, and it is not published."""
        return index in self._states

    @property
    def rows_of_next(self) -> int:
        """How many rows of the lowest free part are unleased."""
        return count_rows(self[self._free[0]].unleased)

    def take_free(self) -> int:
        """Take the lowest free part out of the queue, to be leased."""
        index = heappop(self._free)
        self._queued.discard(index)
        return index

    def lease(self, index: int, fence: int) -> Ranges:
        """Have a lease hold all unleased rows of a part, which was taken out of the queue."""
        state = self._states[index]
        rows, state.unleased = state.unleased, ()
        self.rows_unleased -= count_rows(rows)
        self._hold(state, fence, rows)
        return rows

    def lease_aside(self, index: int, fence: int, row_ids: RowIds) -> Ranges:
        """Have a lease hold rows that were set aside."""
        state = self._states[index]
        rows, state.aside = tuple(ranges_of(row_ids)), without_rows(state.aside, row_ids)
        self._hold(state, fence, rows)
        return rows

    def set_aside(self, index: int, row_ids: RowIds) -> None:
        """Keep unleased rows apart."""
        state = self[index]
        state.unleased = without_rows(state.unleased, row_ids)
        state.aside = _with_rows(state.aside, row_ids)
        self.rows_unleased -= len(row_ids)
        self.requeue(index)

    def take_back_aside(self, index: int, row_ids: RowIds) -> None:
        """Have rows that were set aside be as any others."""
        state = self._states[index]
        state.aside = without_rows(state.aside, row_ids)
        self.unlease(index, row_ids)

    def unlease(self, index: int, row_ids: RowIds) -> None:
        """Take up rows that nobody has any more, and that are not finished."""
        state = self._states[index]
        state.unleased = _with_rows(state.unleased, row_ids)
        self.rows_unleased += len(row_ids)
        self.requeue(index)

    def requeue(self, index: int) -> None:
        """Have a part in the queue if, and only if, something of it is free."""
        is_free = self._states[index].is_free
        if is_free and index not in self._queued:
            self._queued.add(index)
            heappush(self._free, index)
        elif not is_free and index in self._queued:
            self._queued.discard(index)
            self._free.remove(index)
            self._free.sort()

    def close(self, index: int) -> None:
        """Forget a part that is published."""
        del self._states[index]
        self._is_out.add(index)

    def by_part(self, row_ids: RowIds) -> Iterator[tuple[int, RowIds]]:
        """Rows of each part that has some of them, in order."""
        while len(row_ids):
            part = self._ordered[bisect_right(self._first_rows, int(row_ids[0])) - 1]
            rows = in_range(row_ids, part.rows)
            yield part.index, rows
            row_ids = row_ids[len(rows) :]

    def check_invariants(self) -> None:
        """Check that every row is one's alone, and that nothing free is forgotten."""
        untouched = self._queued - self._states.keys()
        unleased = sum(count_rows(self._rows_at_first(index)) for index in untouched)
        assert sorted(self._free) == sorted(self._queued)
        for index, state in self._states.items():
            groups = [state.unleased, state.aside, *state.held.values()]
            rows = np.concatenate([row_ids_of(group) for group in groups])
            assert len(np.unique(rows)) == len(rows), "a row that two have"
            assert state.is_free == (index in self._queued)
            if state.maker is not None and not state.is_drafted:
                assert [*state.held] == [state.maker]
                assert not state.unleased
                assert not state.aside
            unleased += count_rows(state.unleased)
        assert unleased == self.rows_unleased

    def _hold(self, state: PartState, fence: int, rows: Ranges) -> None:
        """Have a lease hold rows; it makes the part where no others are left."""
        makes = not (state.held or state.aside or state.unleased)
        state.held[fence] = rows
        if makes:
            state.maker = fence

    def _rows_at_first(self, index: int) -> Ranges:
        return self._missing.get(index, (self._parts[index].rows,))
