"""Scaling of a fleet whose workers only take time, on a simulated clock.

    python benchmarks/fleet.py [--workers 1,2,4,8,32] [--rows 200000] [--slots 64]

The ledger and the dispatcher are the real ones. A worker runs ``--slots`` rows at a time, a row of
n tokens for n steps; its engine has half as many queued, as in a fleet, and nobody can take those
back. Output lengths are uniform from 10 to 2,000 tokens; from two workers on, one is
``--slowness`` times slower.

Prints for each number of workers how long the job takes, what share that is of the ideal time (all
slots busy until all rows are done at once), the processor time of the driver's decisions as a share
of the job's, and the process's peak memory.
"""

from __future__ import annotations

import argparse
import heapq
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from batchinfer.job.fleet.dispatcher import Dispatcher, Give, TakeBack
from batchinfer.job.fleet.lease import Lease, row_ids_of
from batchinfer.job.fleet.leases import LeaseLedger
from batchinfer.job.row_ids import Part, sorted_row_ids

STEP_S = 0.02
REPORT_S = 5.0
PUBLISH_S = 0.02
_QUEUED = 0.5  # of the slots


@dataclass
class _Held:
    lease: Lease
    waiting: deque[int]
    missing: dict[int, int]
    """Rows of each part that it makes that are not finished."""
    num_unfinished: int


@dataclass
class _Worker:
    name: str
    step_s: float
    leases: dict[int, _Held] = field(default_factory=dict)
    queued: deque[tuple[int, _Held]] = field(default_factory=deque)
    num_running: int = 0
    rows_done: int = 0
    latest_fence: int = 0

    @property
    def unadmitted(self) -> int:
        return sum(len(held.waiting) for held in self.leases.values())


class Simulation:
    """One job on workers that are there from the start."""

    def __init__(
        self, lengths: np.ndarray, rows_per_part: int, steps_s: list[float], slots: int
    ) -> None:
        self._tokens = lengths.tolist()
        self._slots = slots
        self.ideal_s = float(lengths.sum()) / (slots * sum(1 / step_s for step_s in steps_s))
        stops = range(rows_per_part, len(lengths) + rows_per_part, rows_per_part)
        parts = [
            Part(index, range(stop - rows_per_part, min(stop, len(lengths))))
            for index, stop in enumerate(stops)
        ]
        self.ledger = LeaseLedger(parts, {}, order_window=65536)
        self.dispatcher = Dispatcher(self.ledger)
        self.workers = {f"w{n:02d}": _Worker(f"w{n:02d}", s) for n, s in enumerate(steps_s, 1)}
        self.now = 0.0
        self.driver_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._rows_per_part = rows_per_part
        self._published_at = 0.0

    def run(self) -> float:
        """Simulated seconds until every part is published."""
        for worker in self.workers.values():
            self.dispatcher.ready(worker.name, self.now)
            self._later(REPORT_S, lambda worker=worker: self._report_often(worker))
        self._act()
        while not self.ledger.is_complete:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self.now

    def _later(self, delay_s: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + delay_s, self._num_events, happen))

    def _act(self) -> None:
        began = time.process_time()
        actions = list(self.dispatcher.actions(self.now))
        self.driver_s += time.process_time() - began
        for action in actions:
            match action:
                case Give(lease):
                    self._take(self.workers[lease.worker], lease)
                case TakeBack(name):
                    self._give_back(self.workers[name])

    def _tell(self, call: Callable[[], object]) -> None:
        began = time.process_time()
        call()
        self.driver_s += time.process_time() - began

    def _take(self, worker: _Worker, lease: Lease) -> None:
        rows = deque(row for share in lease.shares for row in row_ids_of(share.rows).tolist())
        missing = {s.part.index: sum(map(len, s.rows)) for s in lease.shares if s.makes}
        held = _Held(lease, rows, missing, len(rows))
        worker.leases[lease.fence] = held
        worker.latest_fence = lease.fence
        for index in [index for index, count in missing.items() if not count]:
            self._draft(held, index)
        self._feed(worker)
        self._end_if_done(worker, held)

    def _feed(self, worker: _Worker) -> None:
        before = worker.unadmitted
        for held in worker.leases.values():
            while held.waiting and len(worker.queued) < _QUEUED * self._slots:
                worker.queued.append((held.waiting.popleft(), held))
        while worker.queued and worker.num_running < self._slots:
            row, held = worker.queued.popleft()
            worker.num_running += 1
            tokens = self._tokens[row]
            self._later(
                tokens * worker.step_s,
                lambda row=row, held=held: self._finish(worker, held, row),
            )
        if before and not worker.unadmitted:
            self._later(0.001, lambda: self._report(worker))

    def _finish(self, worker: _Worker, held: _Held, row: int) -> None:
        worker.num_running -= 1
        worker.rows_done += 1
        held.num_unfinished -= 1
        index = row // self._rows_per_part
        if index in held.missing:
            held.missing[index] -= 1
            if not held.missing[index]:
                self._draft(held, index)
        self._feed(worker)
        self._end_if_done(worker, held)

    def _draft(self, held: _Held, index: int) -> None:
        del held.missing[index]
        fence = held.lease.fence
        self._tell(lambda: self.ledger.draft(fence, index))
        self._published_at = max(self._published_at, self.now) + PUBLISH_S
        self._later(self._published_at - self.now, lambda: self._published(index))

    def _published(self, index: int) -> None:
        self._tell(lambda: self.ledger.published(index))
        self._act()

    def _end_if_done(self, worker: _Worker, held: _Held) -> None:
        if not held.num_unfinished and held.lease.fence in worker.leases:
            del worker.leases[held.lease.fence]
            self._tell(lambda: self.dispatcher.ended(worker.name, held.lease.fence))
            self._act()

    def _give_back(self, worker: _Worker) -> None:
        left = worker.unadmitted // 2
        answer = []
        for fence, held in reversed(worker.leases.items()):
            rows = [held.waiting.pop() for _ in range(min(left, len(held.waiting)))]
            left -= len(rows)
            held.num_unfinished -= len(rows)
            for index in {row // self._rows_per_part for row in rows} & held.missing.keys():
                del held.missing[index]
            if rows:
                answer.append((fence, sorted_row_ids(rows)))
        self._later(0.001, lambda: self._gave_back(worker, answer))

    def _gave_back(self, worker: _Worker, answer: list) -> None:
        self._tell(lambda: self.dispatcher.gave_back(worker.name, answer))
        self._act()
        for held in list(worker.leases.values()):
            self._end_if_done(worker, held)

    def _report_often(self, worker: _Worker) -> None:
        self._report(worker)
        self._later(REPORT_S, lambda: self._report_often(worker))

    def _report(self, worker: _Worker) -> None:
        told = (worker.unadmitted, worker.rows_done, worker.latest_fence)
        self._tell(lambda: self.dispatcher.reported(worker.name, self.now, *told))
        self._act()


def simulate(
    num_workers: int, num_rows: int, *, slots: int, slowness: float, rows_per_part: int
) -> Simulation:
    """Run a job on ``num_workers``, of whom the last is slower if there are two."""
    lengths = np.random.default_rng(0).integers(10, 2001, num_rows)
    steps_s = [STEP_S] * num_workers
    if num_workers > 1:
        steps_s[-1] *= slowness
    simulation = Simulation(lengths, rows_per_part, steps_s, slots)
    simulation.run()
    return simulation


def _lines(options: argparse.Namespace) -> Iterator[str]:
    yield "workers   time, s   of ideal   driver   peak, MB"
    for num_workers in map(int, options.workers.split(",")):
        done = simulate(
            num_workers,
            options.rows,
            slots=options.slots,
            slowness=options.slowness,
            rows_per_part=options.rows_per_part,
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        yield (
            f"{num_workers:7} {done.now:9,.0f} {done.ideal_s / done.now:10.3f} "
            f"{done.driver_s / done.now:8.3%} {peak:10,.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,4,8,32")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rows-per-part", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--slowness", type=float, default=4.0)
    for line in _lines(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
