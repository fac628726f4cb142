"""A fleet of workers that only count: rows run, rows on disk, parts drafted and published."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batchinfer.job.fleet.dispatcher import Dispatcher, Give, Kill, Look, TakeBack
from batchinfer.job.fleet.lease import Lease, row_ids_of
from batchinfer.job.fleet.leases import LeaseLedger
from batchinfer.job.row_ids import Part, sorted_row_ids


@dataclass
class FakeLease:
    """A lease as its worker sees it."""

    lease: Lease
    waiting: list[int]
    made: dict[int, set[int]]
    """Rows of each part that it is to make, by the part's index; drafted ones leave."""
    in_memory: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)


@dataclass
class FakeWorker:
    """What a worker holds; ``told`` is what the driver has not heard yet."""

    name: str
    leases: dict[int, FakeLease] = field(default_factory=dict)
    told: deque[Callable[[], None]] = field(default_factory=deque)
    rows_done: int = 0
    latest_fence: int = 0

    @property
    def unadmitted(self) -> int:
        return sum(len(held.waiting) for held in self.leases.values())


class FakeFleet:
    """Workers, a disk, and the driver's side of them.

    Args:
        parts: the job.
        done: rows on disk from the start.
        poison: rows that kill whoever runs them.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        order_window: int,
        done: frozenset[int] = frozenset(),
        poison: frozenset[int] = frozenset(),
    ) -> None:
        self.parts = {part.index: part for part in parts}
        self.disk = set(done)
        """Rows in segments."""
        self.poison = poison
        self.failed: set[int] = set()
        """Rows written as failed."""
        self.drafted: list[int] = []
        self.published: dict[int, set[int]] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.ghosts: list[FakeWorker] = []
        """Workers that the driver has given up: what they still tell comes late."""
        self.now = 0.0
        self.num_started = 0
        missing = {
            part.index: tuple(_ranges(set(part.rows) - self.disk))
            for part in parts
            if self.disk & set(part.rows)
        }
        self.ledger = LeaseLedger(parts, missing, order_window)
        self.dispatcher = Dispatcher(self.ledger)

    def start_worker(self) -> None:
        self.num_started += 1
        worker = FakeWorker(f"w{self.num_started:02d}")
        self.workers[worker.name] = worker
        self.dispatcher.ready(worker.name, self.now)
        self.act()

    def act(self) -> None:
        """Do what the driver decides."""
        for action in list(self.dispatcher.actions(self.now)):
            worker = self.workers[
                action.lease.worker if isinstance(action, Give) else action.worker
            ]
            match action:
                case Give(lease, given_up):
                    self._take(worker, lease, set(given_up.tolist()))
                case TakeBack():
                    self._give_back(worker, everything=action.everything)
                case Look():
                    pass  # nothing is seen
                case Kill():
                    self.kill(worker.name, late=True)
        self.ledger.check_invariants()

    def admit(self, name: str, count: int) -> None:
        """Have a worker's engine take rows; a poisonous one is its end."""
        worker = self.workers[name]
        for held in worker.leases.values():
            taken, held.waiting = held.waiting[:count], held.waiting[count:]
            held.running |= {*taken}
            count -= len(taken)
            if held.running & self.poison:
                self.kill(name, late=False)
                return
        self._tell_progress(worker)

    def finish(self, name: str, count: int) -> None:
        """Have a worker finish rows, make the parts that are complete, and end leases."""
        worker = self.workers[name]
        for held in list(worker.leases.values()):
            rows = sorted(held.running)[:count]
            count -= len(rows)
            held.running -= {*rows}
            held.in_memory |= {*rows}
            worker.rows_done += len(rows)
            self._make_parts(worker, held)
        self._tell_progress(worker)

    def flush(self, name: str) -> None:
        """Put a worker's finished rows on disk."""
        for held in self.workers[name].leases.values():
            self.disk |= held.in_memory
            held.in_memory.clear()

    def hear(self, name: str) -> None:
        """Let the driver have a worker's next message."""
        if self.workers[name].told:
            self.workers[name].told.popleft()()
        self.act()

    def kill(self, name: str, *, late: bool) -> None:
        """End a worker; with ``late``, what it has told already arrives after its death."""
        worker = self.workers.pop(name)
        if late:
            self.ghosts.append(worker)
        # Of rows in its memory the log does not know that they are finished.
        logged = {
            row for lease in worker.leases.values() for row in (lease.running | lease.in_memory)
        }
        held = {*self.ledger.rows_held(name).tolist()}
        in_flight = (logged & held) - self.disk
        self.dispatcher.died(name, sorted_row_ids(in_flight), sorted_row_ids(held & self.disk))
        self.act()

    def publish(self) -> None:
        """Publish the oldest draft."""
        if self.drafted:
            self.ledger.published(self.drafted.pop(0))
            self.act()

    def _take(self, worker: FakeWorker, lease: Lease, given_up: set[int]) -> None:
        rows = [int(row) for share in lease.shares for row in row_ids_of(share.rows)]
        made = {share.part.index: set(share.part.rows) for share in lease.shares if share.makes}
        held = FakeLease(lease, [row for row in rows if row not in given_up], made)
        held.in_memory |= {*rows} & given_up
        self.failed |= {*rows} & given_up
        worker.leases[lease.fence] = held
        worker.latest_fence = lease.fence
        self._make_parts(worker, held)

    def _give_back(self, worker: FakeWorker, *, everything: bool) -> None:
        answer = []
        left = worker.unadmitted if everything else worker.unadmitted // 2
        for held in reversed(worker.leases.values()):
            count = min(left, len(held.waiting))
            if not count:
                continue
            left -= count
            rows, held.waiting = held.waiting[-count:], held.waiting[:-count]
            for index in list(held.made):
                if held.made[index] & {*rows}:
                    del held.made[index]
            answer.append((held.lease.fence, sorted_row_ids(rows)))
        worker.told.append(lambda: self.dispatcher.gave_back(worker.name, answer))
        for held in list(worker.leases.values()):
            self._make_parts(worker, held)

    def _make_parts(self, worker: FakeWorker, held: FakeLease) -> None:
        fence = held.lease.fence
        for index, rows in list(held.made.items()):
            found = rows & (self.disk | held.in_memory)
            if found == rows:
                del held.made[index]
                worker.told.append(lambda i=index, found=found: self._drafted(fence, i, found))
        if not (held.waiting or held.running or held.made):
            self.disk |= held.in_memory
            del worker.leases[fence]
            worker.told.append(lambda: self.dispatcher.ended(worker.name, fence))

    def _drafted(self, fence: int, index: int, rows: set[int]) -> None:
        if self.ledger.draft(fence, index):
            assert index not in self.published, "a part published twice"
            self.published[index] = rows
            self.drafted.append(index)

    def _tell_progress(self, worker: FakeWorker) -> None:
        told = (worker.unadmitted, worker.rows_done, worker.latest_fence)
        worker.told.append(lambda: self.dispatcher.reported(worker.name, self.now, *told))


def _ranges(rows: set[int]) -> list[range]:
    return [range(row, row + 1) for row in sorted(rows)]
