"""The ledger of a fleet's leases: which rows are whose, which parts are drafted, which are out.

A *lease* gives rows to one worker: whole parts as a rule, in ascending order. Its number is its
*fence*: what comes from a worker under a fence that is no longer current is refused, however late a
frozen worker thaws. A lease *makes* a part if it was given all rows of it that were not finished;
it drafts the file, which is then published. Where rows of a part went to several leases, because
some were taken back from a slow worker or were run apart, each only leaves its rows in segments,
and a last lease, with nothing to run, makes the part of them.

Sizes shrink with the rows that are left (guided self-scheduling, Polychronopoulos & Kuck 1987), so
that workers end together; what that leaves uneven, taking back rows mends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from batchinfer.job.fleet.lease import Lease, Ranges, Share, count_rows, row_ids_of
from batchinfer.job.row_ids import NO_ROWS, Part, RowIds, in_range, ranges_of

LEASES_PER_WORKER = 2
"""One that runs, and one to come: an engine between two leases would drain."""
MAX_UNPUBLISHED = 16
"""Drafts that wait to be published; while there are so many, nothing is leased."""


def _without(ranges: Ranges, row_ids: RowIds) -> Ranges:
    return tuple(ranges_of(np.setdiff1d(row_ids_of(ranges), row_ids, assume_unique=True)))


def _joined(ranges: Ranges, row_ids: RowIds) -> Ranges:
    return tuple(ranges_of(np.union1d(row_ids_of(ranges), row_ids)))


@dataclass(slots=True)
class _PartState:
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


class LeaseLedger:
    """Leases of the rows that a job has left.

    Args:
        parts: the parts to make, in order.
        missing: of those of them that have finished rows already, the rows that are not; by index.
        order_window: most rows of a lease of more than one part.
    """

    def __init__(
        self, parts: Sequence[Part], missing: Mapping[int, Ranges], order_window: int
    ) -> None:
        self._ordered = parts
        self._first_rows = [part.rows.start for part in parts]
        self._parts = {part.index: part for part in parts}
        self._missing = dict(missing)
        self._window = order_window
        self._states: dict[int, _PartState] = {}
        self._leases: dict[int, Lease] = {}
        self._of_worker: dict[str, dict[int, Lease]] = defaultdict(dict)
        self._free = [part.index for part in parts]  # ascending, and so a heap
        self._queued = set(self._free)
        self._is_published: set[int] = set()
        self.num_unpublished = 0
        """Drafts that wait to be published."""
        self._num_left = len(self._parts)
        self._latest_fence = 0
        self.rows_unleased = sum(count_rows(self._rows_at_first(index)) for index in self._free)
        """Rows that no worker has, and that are not finished."""

    @property
    def is_complete(self) -> bool:
        """Whether every part is published."""
        return not self._num_left

    @property
    def is_blocked(self) -> bool:
        """Whether nothing is leased until drafts have been published."""
        return self.num_unpublished >= MAX_UNPUBLISHED

    @property
    def has_free(self) -> bool:
        """Whether something is left to lease."""
        return bool(self._free)

    @property
    def fences(self) -> set[int]:
        """Of the current leases."""
        return set(self._leases)

    def has_room(self, worker: str) -> bool:
        """Whether a worker may have one more lease."""
        return not self.is_blocked and len(self._of_worker[worker]) < LEASES_PER_WORKER

    def leases_of(self, worker: str) -> list[Lease]:
        """The current leases of a worker, oldest first."""
        return list(self._of_worker[worker].values())

    def rows_held(self, worker: str) -> RowIds:
        """Rows that a worker has and that are in no draft: all that can be lost with it."""
        held = [
            row_ids_of(self._states[index].held[lease.fence])
            for lease in self.leases_of(worker)
            for index in self._held_by(lease)
            if not self._states[index].is_drafted
        ]
        return np.unique(np.concatenate([NO_ROWS, *held]))

    def grant(self, worker: str, num_workers: int) -> Lease | None:
        """Lease the next rows to ``worker``.

        Args:
            num_workers: among which what is left is to be divided.

        Returns:
            None where it has leases enough, nothing is free, or too many drafts wait.
        """
        if not self.has_room(worker):
            return None
        most = min(self._window, self.rows_unleased // (2 * max(1, num_workers)))
        indices: list[int] = []
        num_rows = 0
        while self._free:
            rows = count_rows(self._state(self._free[0]).unleased)
            if indices and num_rows + rows > most:
                break
            indices.append(self._take_free())
            num_rows += rows
        return self._lease(worker, [(index, None) for index in indices]) if indices else None

    def grant_aside(self, worker: str, row_ids: RowIds) -> Lease:
        """Lease rows that were set aside, and nothing else."""
        return self._lease(worker, [(index, rows) for index, rows in self._by_part(row_ids)])

    def set_aside(self, row_ids: RowIds) -> None:
        """Keep unleased rows out of ``grant``."""
        for index, rows in self._by_part(row_ids):
            state = self._state(index)
            state.unleased = _without(state.unleased, rows)
            state.aside = _joined(state.aside, rows)
            self.rows_unleased -= len(rows)
            self._requeue(index)

    def take_back_aside(self, row_ids: RowIds) -> None:
        """Let rows that were set aside be leased as any others."""
        for index, rows in self._by_part(row_ids):
            state = self._states[index]
            state.aside = _without(state.aside, rows)
            self._return(index, rows)

    def give_back(self, fence: int, row_ids: RowIds) -> bool:
        """Take rows from a lease whose worker will not run them; False if it is not current."""
        lease = self._leases.get(fence)
        if lease is None:
            return False
        for index, rows in self._by_part(row_ids):
            state = self._states[index]
            assert not state.is_drafted, "rows of a part that is made already"
            before = count_rows(state.held[fence])
            state.held[fence] = _without(state.held[fence], rows)
            assert count_rows(state.held[fence]) == before - len(rows), "not rows of this lease"
            if state.maker == fence:
                state.maker = None
            if not state.held[fence]:
                del state.held[fence]
            self._return(index, rows)
        return True

    def draft(self, fence: int, index: int) -> bool:
        """Take a part that a worker has made; False if it was not, or is no longer, its to make."""
        state = self._states.get(index)
        if fence not in self._leases or state is None or state.maker != fence or state.is_drafted:
            return False
        state.is_drafted = True
        self.num_unpublished += 1
        return True

    def published(self, index: int) -> None:
        """A part that was drafted is out: nothing of it is left to do."""
        assert self._states[index].is_drafted
        del self._states[index]
        self._is_published.add(index)
        self.num_unpublished -= 1
        self._num_left -= 1

    def end(self, fence: int) -> bool:
        """A worker has finished a lease, its rows are on disk; False if it is not current."""
        if fence not in self._leases:
            return False
        lease = self._remove(fence)
        for index in self._held_by(lease):
            state = self._states[index]
            del state.held[fence]
            assert state.is_drafted or state.maker != fence, "a lease ended before what it makes"
            self._requeue(index)
        return True

    def revoke(self, fence: int, finished: RowIds) -> None:
        """Take all from a lease, whose worker is dead or fenced.

        Args:
            finished: rows that are on disk.
        """
        lease = self._remove(fence)
        for index in self._held_by(lease):
            state = self._states[index]
            rows = state.held.pop(fence)
            if state.is_drafted:
                continue
            if state.maker == fence:
                state.maker = None
            there = in_range(finished, self._parts[index].rows)
            self._return(index, np.setdiff1d(row_ids_of(rows), there, assume_unique=True))

    def check_invariants(self) -> None:
        """Check that every row is one's alone, and that nothing free is forgotten."""
        untouched = self._queued - self._states.keys()
        unleased = sum(count_rows(self._rows_at_first(index)) for index in untouched)
        assert sorted(self._free) == sorted(self._queued)
        for index, state in self._states.items():
            groups = [state.unleased, state.aside, *state.held.values()]
            rows = np.concatenate([row_ids_of(group) for group in groups])
            assert len(np.unique(rows)) == len(rows), "a row that two have"
            assert state.held.keys() <= self._leases.keys()
            assert state.is_free == (index in self._queued)
            if state.maker is not None and not state.is_drafted:
                assert [*state.held] == [state.maker]
                assert not state.unleased
                assert not state.aside
            unleased += count_rows(state.unleased)
        drafted = sum(state.is_drafted for state in self._states.values())
        assert drafted == self.num_unpublished
        assert unleased == self.rows_unleased

    def _lease(self, worker: str, wanted: Sequence[tuple[int, RowIds | None]]) -> Lease:
        """A lease of all free rows of parts, or of rows that were set aside."""
        self._latest_fence += 1
        fence = self._latest_fence
        shares = []
        for index, aside in wanted:
            state = self._states[index]
            if aside is None:
                rows, state.unleased = state.unleased, ()
                self.rows_unleased -= count_rows(rows)
            else:
                rows, state.aside = tuple(ranges_of(aside)), _without(state.aside, aside)
            makes = not (state.held or state.aside or state.unleased)
            state.held[fence] = rows
            if makes:
                state.maker = fence
            shares.append(Share(self._parts[index], rows, makes))
        lease = self._leases[fence] = Lease(fence, worker, tuple(shares))
        self._of_worker[worker][fence] = lease
        return lease

    def _remove(self, fence: int) -> Lease:
        lease = self._leases.pop(fence)
        del self._of_worker[lease.worker][fence]
        return lease

    def _held_by(self, lease: Lease) -> list[int]:
        indices = [share.part.index for share in lease.shares]
        return [i for i in indices if i in self._states and lease.fence in self._states[i].held]

    def _return(self, index: int, row_ids: RowIds) -> None:
        state = self._states[index]
        state.unleased = _joined(state.unleased, row_ids)
        self.rows_unleased += len(row_ids)
        self._requeue(index)

    def _requeue(self, index: int) -> None:
        """Have a part in the queue if, and only if, something of it is free."""
        is_free = self._states[index].is_free
        if is_free and index not in self._queued:
            self._queued.add(index)
            heappush(self._free, index)
        elif not is_free and index in self._queued:
            self._queued.discard(index)
            self._free.remove(index)
            self._free.sort()

    def _take_free(self) -> int:
        index = heappop(self._free)
        self._queued.discard(index)
        return index

    def _state(self, index: int) -> _PartState:
        assert index not in self._is_published, "nothing of a published part is left to do"
        if index not in self._states:
            self._states[index] = _PartState(self._rows_at_first(index))
            self._missing.pop(index, None)
        return self._states[index]

    def _rows_at_first(self, index: int) -> Ranges:
        return self._missing.get(index, (self._parts[index].rows,))

    def _by_part(self, row_ids: RowIds) -> Iterator[tuple[int, RowIds]]:
        """Rows of each part that has some of them, in order."""
        while len(row_ids):
            part = self._ordered[bisect_right(self._first_rows, int(row_ids[0])) - 1]
            rows = in_range(row_ids, part.rows)
            yield part.index, rows
            row_ids = row_ids[len(rows) :]
