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

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from batchinfer.job.fleet.lease import Lease, Ranges, Share, count_rows, row_ids_of
from batchinfer.job.fleet.open_parts import OpenParts, without_rows
from batchinfer.job.row_ids import NO_ROWS, Part, RowIds, in_range

LEASES_PER_WORKER = 2
"""One that runs, and one to come: an engine between two leases would drain."""
MAX_UNPUBLISHED = 16
"""Drafts that wait to be published; while there are so many, nothing is leased."""


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
        self._parts = OpenParts(parts, missing)
        self._window = order_window
        self._leases: dict[int, Lease] = {}
        self._of_worker: dict[str, dict[int, Lease]] = defaultdict(dict)
        self._latest_fence = 0
        self.num_unpublished = 0
        """Drafts that wait to be published."""

    @property
    def is_complete(self) -> bool:
        """Whether every part is published."""
        return not self._parts.num_left

    @property
    def is_blocked(self) -> bool:
        """Whether nothing is leased until drafts have been published."""
        return self.num_unpublished >= MAX_UNPUBLISHED

    @property
    def has_free(self) -> bool:
        """Whether something is left to lease."""
        return self._parts.has_free

    @property
    def rows_unleased(self) -> int:
        """Rows that no worker has, and that are not finished."""
        return self._parts.rows_unleased

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
            row_ids_of(self._parts[index].held[lease.fence])
            for lease in self.leases_of(worker)
            for index in self._held_by(lease)
            if not self._parts[index].is_drafted
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
        wanted: list[tuple[int, RowIds | None]] = []
        num_rows = 0
        while self._parts.has_free:
            rows = self._parts.rows_of_next
            if wanted and num_rows + rows > most:
                break
            wanted.append((self._parts.take_free(), None))
            num_rows += rows
        return self._lease(worker, wanted) if wanted else None

    def grant_aside(self, worker: str, row_ids: RowIds) -> Lease:
        """Lease rows that were set aside, and nothing else."""
        return self._lease(worker, list(self._parts.by_part(row_ids)))

    def set_aside(self, row_ids: RowIds) -> None:
        """Keep unleased rows out of ``grant``."""
        for index, rows in self._parts.by_part(row_ids):
            self._parts.set_aside(index, rows)

    def take_back_aside(self, row_ids: RowIds) -> None:
        """Let rows that were set aside be leased as any others."""
        for index, rows in self._parts.by_part(row_ids):
            self._parts.take_back_aside(index, rows)

    def give_back(self, fence: int, row_ids: RowIds) -> bool:
        """Take rows from a lease whose worker will not run them; False if it is not current."""
        if fence not in self._leases:
            return False
        for index, rows in self._parts.by_part(row_ids):
            state = self._parts[index]
            assert not state.is_drafted, "rows of a part that is made already"
            before = count_rows(state.held[fence])
            state.held[fence] = without_rows(state.held[fence], rows)
            assert count_rows(state.held[fence]) == before - len(rows), "not rows of this lease"
            if state.maker == fence:
                state.maker = None
            if not state.held[fence]:
                del state.held[fence]
            self._parts.unlease(index, rows)
        return True

    def draft(self, fence: int, index: int) -> bool:
        """Take a part that a worker has made; False if it was not, or is no longer, its to make."""
        if fence not in self._leases or not self._parts.is_open(index):
            return False
        state = self._parts[index]
        if state.maker != fence or state.is_drafted:
            return False
        state.is_drafted = True
        self.num_unpublished += 1
        return True

    def published(self, index: int) -> None:
        """A part that was drafted is out: nothing of it is left to do."""
        assert self._parts[index].is_drafted
        self._parts.close(index)
        self.num_unpublished -= 1

    def end(self, fence: int) -> bool:
        """A worker has finished a lease, its rows are on disk; False if it is not current."""
        if fence not in self._leases:
            return False
        lease = self._remove(fence)
        for index in self._held_by(lease):
            state = self._parts[index]
            del state.held[fence]
            assert state.is_drafted or state.maker != fence, "a lease ended before what it makes"
            self._parts.requeue(index)
        return True

    def revoke(self, fence: int, finished: RowIds) -> None:
        """Take all from a lease, whose worker is dead or fenced.

        Args:
            finished: rows that are on disk.
        """
        lease = self._remove(fence)
        for index in self._held_by(lease):
            state = self._parts[index]
            rows = state.held.pop(fence)
            if state.is_drafted:
                continue
            if state.maker == fence:
                state.maker = None
            there = in_range(finished, self._parts.part(index).rows)
            left = np.setdiff1d(row_ids_of(rows), there, assume_unique=True)
            self._parts.unlease(index, left)

    def check_invariants(self) -> None:
        """Check that every row is one's alone, and that nothing free is forgotten."""
        self._parts.check_invariants()
        states = self._parts.states
        assert all(state.held.keys() <= self._leases.keys() for state in states)
        assert sum(state.is_drafted for state in states) == self.num_unpublished

    def _lease(self, worker: str, wanted: Sequence[tuple[int, RowIds | None]]) -> Lease:
        """A lease of all free rows of parts, or of rows that were set aside."""
        self._latest_fence += 1
        fence = self._latest_fence
        shares = []
        for index, aside in wanted:
            if aside is None:
                rows = self._parts.lease(index, fence)
            else:
                rows = self._parts.lease_aside(index, fence, aside)
            makes = self._parts[index].maker == fence
            shares.append(Share(self._parts.part(index), rows, makes))
        lease = self._leases[fence] = Lease(fence, worker, tuple(shares))
        self._of_worker[worker][fence] = lease
        return lease

    def _remove(self, fence: int) -> Lease:
        lease = self._leases.pop(fence)
        del self._of_worker[lease.worker][fence]
        return lease

    def _held_by(self, lease: Lease) -> list[int]:
        """Parts of which a lease holds rows that may have to run yet."""
        indices = [share.part.index for share in lease.shares]
        return [
            index
            for index in indices
            if self._parts.is_open(index) and lease.fence in self._parts[index].held
        ]
