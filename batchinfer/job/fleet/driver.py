"""The driver of a fleet: what workers tell goes into the ledger, what is decided goes to them.

Only the driver publishes parts, writes records and deletes segments. It holds the output's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Protocol

import numpy as np
import pyarrow as pa

from batchinfer.console.progress import Progress
from batchinfer.errors import DeviceError, JobError, StorageError
from batchinfer.job.fleet.dispatcher import Dispatcher, Give, Kill, Look, TakeBack
from batchinfer.job.fleet.files.inbox import Inboxes, read_wanted
from batchinfer.job.fleet.files.publisher import PartPublisher, sweep
from batchinfer.job.fleet.leases import LeaseLedger, Ranges
from batchinfer.job.fleet.messages import Answer, Assignment, Failure, Ready, WorkerReport
from batchinfer.job.fleet.nodes import Nodes
from batchinfer.job.job import OutputJob
from batchinfer.job.output.commit import Draft
from batchinfer.job.output.quarantine import logged_rows
from batchinfer.job.output.resume import RecoveredRows
from batchinfer.job.row_ids import NO_ROWS, RowIds, in_range, missing_ranges, sorted_row_ids
from batchinfer.job.run_ids import run_id
from batchinfer.job.storage.filesystem import storage_errors

STOP_S = 4.0
"""How long workers have to put everything on disk when the job stops."""
_WAIT_S = 0.2
_OF_ITS_NODE = (DeviceError.__name__, StorageError.__name__)
"""What a worker may fail of that others do not: its device, its disks."""


@dataclass(frozen=True)
class Up:
    """A worker is ready."""

    worker: str
    node: str
    """Its id in the cluster."""
    ready: Ready


@dataclass(frozen=True)
class NotUp:
    """A worker could not be started."""

    worker: str
    node: str
    failure: Failure


@dataclass(frozen=True)
class Told:
    """A worker's report."""

    worker: str
    report: WorkerReport


@dataclass(frozen=True)
class Gone:
    """A worker that was up is no more."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Seen:
    """A worker's process has been looked at."""

    worker: str
    is_busy: bool
    """Whether it computes."""


@dataclass(frozen=True)
class Lost:
    """The cluster is lost, and all workers with it, those too that were not up yet."""

    reason: str


WorkerEvent = Up | NotUp | Told | Gone | Seen | Lost


class Workers(Protocol):
    """Processes with an engine each, wherever they run."""

    def start(self, worker: str, run_id: str, avoid: frozenset[str]) -> None:
        """Begin to start a worker, on none of the nodes in ``avoid``; it may have to wait."""
        ...

    def use_kernels(self, kernels: Mapping[str, str]) -> None:
        """Have workers that are started from now on compute with these."""
        ...

    def give(self, worker: str, assignment: Assignment) -> None:
        """Send a lease."""
        ...

    def take_back(self, worker: str, *, everything: bool) -> None:
        """Ask for rows."""
        ...

    def look(self, worker: str) -> None:
        """Find out whether a worker's process computes; a ``Seen`` may follow."""
        ...

    def supply(self, worker: str, answer: Answer) -> None:
        """Send what a worker wants of a file."""
        ...

    def stop(self, worker: str) -> None:
        """Ask a worker to put everything on disk and end."""
        ...

    def kill(self, worker: str) -> None:
        """End a worker's process; a ``Gone`` follows."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """What has happened; within the time, or as soon as something has."""
        ...


@dataclass(frozen=True)
class FleetSize:
    """How many workers there are to be."""

    workers: int
    min_workers: int = 1
    """Rows are leased when so many are up."""
    start_timeout_s: float = 600.0
    """Until so many must be up."""
    waited_s: float = 0.0
    """What of that has passed before: until there was a cluster."""
    same_kernels: bool = False
    """All compute with the kernels that the first to be up has found to be the fastest."""


@dataclass
class FleetDriver:
    """One job's driver.

    Args:
        recovered: the parts to make, and what is there of them already.
        run_number: of the run; workers' run ids have it.
        log: told what happens to workers.
        clock: seconds.
    """

    job: OutputJob
    recovered: RecoveredRows
    workers: Workers
    size: FleetSize
    run_number: int
    clear: Callable[[], None]
    """Called when the first worker is up: deletes what is to be overwritten."""
    progress: Progress
    stop: Event
    log: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic

    _started: dict[str, float] = field(default_factory=dict, init=False)
    """Workers that are to come up, and since when."""
    _counted: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    """Rows and tokens of each worker that are counted."""
    _pools: dict[str, float] = field(default_factory=dict, init=False)
    """Used share of each worker's KV blocks."""
    _nodes: Nodes = field(default_factory=Nodes, init=False)
    _node_of: dict[str, str] = field(default_factory=dict, init=False)
    """Nodes of the workers that came up."""
    _over: set[str] = field(default_factory=set, init=False)
    _num_started: int = field(default=0, init=False)
    _has_begun: bool = field(default=False, init=False)
    _last_up: float = field(default=0.0, init=False)
    """When a worker was up last, once rows are leased."""
    _may_differ: set[str] = field(default_factory=set, init=False)
    """Workers that were started before the kernels were known that all are to compute with."""
    _kernels: Mapping[str, str] | None = field(default=None, init=False)
    _tells_late: set[str] = field(default_factory=set, init=False)
    """Workers whose logs of rows in flight are seconds behind."""
    _latest_failure: Failure = field(default=Failure("", ""), init=False)
    """Why a worker could not be started, or ended."""
    _is_cleared: bool = field(default=False, init=False)
    _is_ending: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        parts = self.recovered.parts
        self._by_index = {part.index: part for part in parts}
        self._segments = self.recovered.segments
        missing = _missing(self.recovered)
        self._ledger = LeaseLedger(parts, missing, self.job.spec.engine.order_window)
        self._dispatcher = Dispatcher(self._ledger)
        self._history = self.recovered.crash_history
        self._dispatcher.adopt(self._history)
        self._publisher = PartPublisher(self.job.out)
        self._inboxes = Inboxes(self.job.out)

    def run(self) -> bool:
        """Have all parts made and published.

        Returns:
            False where it was asked to stop before.

        Raises:
            JobError: workers cannot be started, or one met what all would; what is finished stays.
        """
        began = self.clock()
        for _ in range(self.size.workers):
            self._start()
        try:
            while not self._ledger.is_complete and not self.stop.is_set():
                self._turn(began)
        finally:
            self._end()
        if self._ledger.is_complete:
            sweep(self.job.out)
        return self._ledger.is_complete

    def _turn(self, began: float) -> None:
        for event in self.workers.wait(_WAIT_S):
            self._handle(event)
        self._take_published()
        if not self._has_begun:
            self._check_boots(began)
        if self._has_begun:
            for action in self._dispatcher.actions(self.clock()):
                self._do(action)
            self._check_left()

    def _check_boots(self, began: float) -> None:
        """Begin when enough workers are up.

        Raises:
            JobError: so many cannot be had: what their boots ended in, or a ``DeviceError``.
        """
        least, num_up = self.size.min_workers, len(self._dispatcher.workers)
        self._has_begun = num_up >= least
        if num_up + len(self._started) < least:
            raise self._no_more_than(num_up)
        spent_s = self.size.waited_s + self.clock() - began
        if spent_s > self.size.start_timeout_s and not self._has_begun:
            raise DeviceError(
                f"{num_up} of scale.min_workers {least} came up within scale.start_timeout",
                hint="give the cluster more nodes, or the job more time",
            )

    def _check_left(self) -> None:
        """Go on for as long as a worker is up, or may still come.

        Raises:
            DeviceError: none has come up for long.
        """
        if self._dispatcher.workers or self._ledger.is_complete:
            self._last_up = self.clock()
        elif self.clock() - self._last_up > self.size.start_timeout_s:
            raise DeviceError(
                "no worker has been up for as long as scale.start_timeout",
                hint="give the cluster nodes, then run again: finished rows are kept",
            )

    def _agrees(self, worker: str, ready: Ready) -> bool:
        """Whether a worker computes as the first; one that could not know how is started again.

        Those that may differ are started at once all the same: they hardly ever do.
        """
        if not self.size.same_kernels:
            return True
        if self._kernels is None:
            self._kernels = ready.kernels
            self.workers.use_kernels(ready.kernels)
        agrees = ready.kernels == self._kernels or worker not in self._may_differ
        self._may_differ.discard(worker)
        return agrees

    def _start(self) -> None:
        self._num_started += 1
        worker = f"w{self._num_started:02d}"
        self._started[worker] = self.clock()
        if self._kernels is None:
            self._may_differ.add(worker)
        avoid = self._nodes.to_avoid(others_are_up=bool(self._dispatcher.workers))
        self.workers.start(worker, run_id(self.run_number, worker), avoid)

    def _handle(self, event: WorkerEvent) -> None:
        match event:
            case Up(worker, node, ready):
                self._started.pop(worker, None)
                self._nodes.came_up(node)
                self._node_of[worker] = node
                if not self._is_cleared:
                    self.clear()
                    self._is_cleared = True
                if ready.access != "disk":
                    self._tells_late.add(worker)
                way = ", whose files come by the driver" if ready.access == "driver" else ""
                self.log(f"{worker} is up on {ready.host}{way}: {ready.device}")
                if self._agrees(worker, ready):
                    self._dispatcher.ready(worker, self.clock())
                else:
                    self.log(f"{worker} is started again: the first has found other kernels")
                    self.workers.kill(worker)
            case NotUp(worker, node, failure):
                self._not_up(worker, node, failure)
            case Told(worker, report):
                self._hear(worker, report)
            case Gone(worker, reason):
                self._bury(worker, reason)
            case Lost(reason):
                self._begin_again(reason)
            case Seen(worker, is_busy):
                self._dispatcher.seen(worker, self.clock(), is_busy=is_busy)

    def _not_up(self, worker: str, node: str, failure: Failure) -> None:
        self._started.pop(worker, None)
        self.log(f"{worker} could not be started on {node}: {failure.text}")
        self._latest_failure = failure
        if self._nodes.failed_to_boot(node):
            self._start()
        elif not self._started and not self._dispatcher.workers:
            raise self._no_more_than(0)

    def _no_more_than(self, num_up: int) -> JobError:
        """That too few workers could be started, as what the last one of the others failed of."""
        how_many = f"no more than {num_up} workers" if num_up else "no worker"
        failure = self._latest_failure
        text = f"{how_many} could be started: {failure.text}"
        return Failure(failure.kind or DeviceError.__name__, text).error()

    def _hear(self, worker: str, report: WorkerReport) -> None:
        if not self._take_files(worker, report):
            return
        for name, groups in report.segments.items():
            self._segments.note(self.job.out.segments / name, groups)
        for draft in report.drafts:
            self._publish(worker, draft)
        for answer in report.given_back:
            self._dispatcher.gave_back(worker, answer)
        for fence in report.ended:
            self._dispatcher.ended(worker, fence)
        if report.ended:
            self._store_history()
        self._dispatcher.reported(
            worker, self.clock(), report.num_unadmitted, report.rows, report.latest_fence
        )
        rows, tokens = self._counted.get(worker, (0, 0))
        self._counted[worker] = (report.rows, report.tokens)
        self._pools[worker] = report.pool_use
        self.progress.note(self._state())
        self.progress.update(report.rows - rows, report.tokens - tokens, None)
        if report.is_over:
            self._over.add(worker)
            if report.failure is not None:
                self._fail(worker, report.failure)
            if not self._is_ending:
                why = "it was told to stop" if report.failure is None else report.failure.text
                self.log(f"{worker} has ended: {why}")
                self.workers.kill(worker)  # its process; that it is gone comes as an event

    def _take_files(self, worker: str, report: WorkerReport) -> bool:
        """Exchange files with a worker that does not see this disk; False where that went wrong."""
        try:
            self._inboxes.take(run_id(self.run_number, worker), report.changes)
            for wanted in report.wanted:
                self.workers.supply(worker, read_wanted(self.job.out, wanted))
        except ValueError as error:
            self.log(f"{worker} is killed: {error}")
            self.workers.kill(worker)
            return False
        return True

    def _fail(self, worker: str, failure: Failure) -> None:
        """Go on without a worker that failed of what may be its own: a bug that a row has hit, a
        device that broke, a disk of its node that is full.

        Raises:
            JobError: all would meet it, or nobody else is there to go on.
        """
        if not failure.kind:
            return
        others = set(self._dispatcher.workers) - {worker}
        if failure.kind not in _OF_ITS_NODE or not others:
            raise failure.error()
        self._latest_failure = failure
        self._nodes.broke(self._node_of[worker])

    def _state(self) -> str:
        """How many workers are up, and the use of their pools."""
        up = self._dispatcher.workers
        pools = [self._pools[worker] for worker in up if worker in self._pools]
        pool = sum(pools) / max(1, len(pools))
        return f"{len(up)} of {self.size.workers} workers up, pools {pool:.0%}"

    def _publish(self, worker: str, draft: Draft) -> None:
        if not self._ledger.draft(draft.lease, draft.part):
            self.log(f"a draft of part {draft.part} by {worker} is refused: it comes too late")
            return
        self._publisher.submit(self._by_index[draft.part], draft)

    def _take_published(self) -> None:
        for part in self._publisher.published():
            self._segments.drop(part)
            self._ledger.published(part.index)

    def _begin_again(self, reason: str) -> None:
        """Have others come in the place of all workers."""
        self.log(f"the Ray cluster is lost: {reason}")
        coming, self._started = self._started, {}
        for worker in self._dispatcher.workers:
            self._bury(worker, "its cluster is lost", died_of_row=False)
        for _ in coming:
            self._start()

    def _bury(self, worker: str, reason: str, *, died_of_row: bool = True) -> None:
        """Take a dead worker's rows back, and have another come in its place.

        Args:
            died_of_row: whether one that it ran may be what it died of.
        """
        self.log(f"{worker} is gone: {reason}")
        log = self.job.out.in_flight / run_id(self.run_number, worker)
        self._inboxes.close(run_id(self.run_number, worker))
        self._adopt_segments(worker)
        held = self._ledger.rows_held(worker)
        finished = np.intersect1d(held, self._rows_on_disk(worker))
        in_flight = np.setdiff1d(held, finished)
        if worker not in self._tells_late:
            in_flight = np.intersect1d(logged_rows(self.job.out, log), in_flight)
        self._dispatcher.died(worker, in_flight if died_of_row else NO_ROWS, finished)
        self._store_history(died=log.name)
        with storage_errors(log, "delete"):
            self.job.out.files.delete(log)
        self._over.add(worker)
        if not self.stop.is_set() and not self._is_ending:
            self._start()

    def _store_history(self, died: str = "") -> None:
        """Keep what is known of crashes for the next driver, where that is news.

        Args:
            died: the run whose log is counted in it, until that is deleted.
        """
        last_run = died or self._history.last_run
        history = replace(self._dispatcher.history, last_run=last_run)
        if history != self._history:
            self._history = history
            self.job.out.write(self.job.out.suspects, history.to_json())

    def _adopt_segments(self, worker: str) -> None:
        """Take up what a worker has put on disk and not told."""
        for path in self.job.out.files.entries(self.job.out.segments):
            if f"-{worker}-" in path.name and not self._segments.is_known(path):
                with suppress(OSError, ValueError, pa.ArrowException):
                    self._segments.adopt(path)

    def _rows_on_disk(self, worker: str) -> RowIds:
        """Rows on disk of the parts that a worker had."""
        indices = {s.part.index for lease in self._ledger.leases_of(worker) for s in lease.shares}
        rows = [
            self._segments.rows_of(self._by_index[index])["row_id"].to_numpy()
            for index in sorted(indices)
        ]
        return sorted_row_ids(np.concatenate([NO_ROWS, *rows]).tolist())

    def _do(self, action: Give | TakeBack | Look | Kill) -> None:
        match action:
            case Give(lease, given_up):
                indices = {share.part.index for share in lease.shares}
                names = tuple(path.name for path in self._segments.files_of(indices))
                self.workers.give(lease.worker, Assignment(lease, names, given_up))
            case TakeBack(worker, everything):
                self.workers.take_back(worker, everything=everything)
            case Look(worker):
                self.log(f"{worker} tells nothing; it is looked at")
                self.workers.look(worker)
            case Kill(worker, reason):
                self.log(f"{worker} is killed: {reason}")
                self.workers.kill(worker)

    def _end(self) -> None:
        """Have all workers put what they have on disk; publish what they made until then."""
        self._is_ending = True
        alive = set(self._dispatcher.workers)
        for worker in alive:
            self.workers.stop(worker)
        until = self.clock() + STOP_S
        while alive - self._over and self.clock() < until:
            for event in self.workers.wait(_WAIT_S):
                if isinstance(event, Told):
                    with suppress(JobError):  # another error, or none, is what ends the job
                        self._hear(event.worker, event.report)
                elif isinstance(event, Gone):
                    self._over.add(event.worker)
                elif isinstance(event, Lost):
                    self._over |= alive
        self.workers.close()
        self._publisher.close()
        self._take_published()


def _missing(recovered: RecoveredRows) -> Mapping[int, Ranges]:
    """Rows that are not finished, of parts that have finished rows."""
    return {
        part.index: tuple(missing_ranges([part], recovered.finished))
        for part in recovered.parts
        if len(in_range(recovered.finished, part.rows))
    }
