"""The driver of a fleet: what workers tell goes into the ledger, what is decided goes to them.

Only the driver publishes parts, writes records and deletes segments. It holds the output's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from batchinfer.console.meter import Counts
from batchinfer.console.phases import phase
from batchinfer.console.progress import Progress
from batchinfer.errors import DeviceError, JobError, StorageError
from batchinfer.job.fleet.boots import Boots, FleetSize
from batchinfer.job.fleet.dispatcher import Dispatcher, Give, Kill, Look, TakeBack
from batchinfer.job.fleet.files.publisher import PartPublisher, sweep
from batchinfer.job.fleet.lease import Ranges
from batchinfer.job.fleet.leases import LeaseLedger
from batchinfer.job.fleet.losses import Losses
from batchinfer.job.fleet.messages import Assignment, Failure, WorkerReport
from batchinfer.job.fleet.workers import (
    Gone,
    Lost,
    NotUp,
    Seen,
    Told,
    Unheard,
    Up,
    WorkerEvent,
    Workers,
)
from batchinfer.job.job import OutputJob
from batchinfer.job.output.commit import Draft
from batchinfer.job.output.recovery.recovered_rows import RecoveredRows
from batchinfer.job.row_ids import NO_ROWS, in_range, missing_ranges
from batchinfer.job.run_ids import run_id
from batchinfer.job.stats.recorder import note_failure

STOP_S = 4.0
"""How long workers have to put everything on disk when the job stops."""
_WAIT_S = 0.2
_SOON_S = 0.02
_OF_ITS_NODE = (DeviceError.__name__, StorageError.__name__)
"""What a worker may fail of that others do not: its device, its disks."""


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

    _counted: dict[str, Counts] = field(default_factory=dict, init=False)
    """What is counted of each worker."""
    _pools: dict[str, float | None] = field(default_factory=dict, init=False)
    """Used share of each worker's KV blocks."""
    _over: set[str] = field(default_factory=set, init=False)
    _has_begun: bool = field(default=False, init=False)
    _last_up: float = field(default=0.0, init=False)
    """When a worker was up last, once rows are leased."""
    _tells_late: set[str] = field(default_factory=set, init=False)
    """Workers whose logs of rows in flight are seconds behind."""
    _is_cleared: bool = field(default=False, init=False)
    _is_ending: bool = field(default=False, init=False)
    _ended_by: tuple[str, str] | None = field(default=None, init=False)
    """The worker whose failure has ended the job, and why it failed."""

    def __post_init__(self) -> None:
        parts = self.recovered.parts
        self._by_index = {part.index: part for part in parts}
        self._segments = self.recovered.segments
        missing = _missing(self.recovered)
        self._ledger = LeaseLedger(parts, missing, self.job.spec.engine.order_window)
        self._dispatcher = Dispatcher(self._ledger)
        self._dispatcher.suspects.adopt(self.recovered.crash_history)
        self._losses = Losses(self.job.out, self.recovered, self._ledger, self.run_number)
        self._publisher = PartPublisher(self.job.out)

    def run(self) -> bool:
        """Have all parts made and published.

        Returns:
            False where it was asked to stop before.

        Raises:
            JobError: workers cannot be started, or one met what all would; what is finished stays.
        """
        self._boots = Boots(self.workers, self.size, self.run_number, self.log, self.clock)
        self._boots.start_all()
        try:
            with phase("loading the model on workers"):
                while not self._has_begun and self._goes_on():
                    self._turn()
            while self._goes_on():
                self._turn()
        finally:
            self._end()
        if self._ledger.is_complete:
            sweep(self.job.out)
        return self._ledger.is_complete

    def _goes_on(self) -> bool:
        return not self._ledger.is_complete and not self.stop.is_set()

    def _turn(self) -> None:
        now = self.clock()  # whoever has told something until then is heard before it is judged
        # Nobody tells that a part is published; the last one ends the job.
        for event in self.workers.wait(_SOON_S if self._ledger.num_unpublished else _WAIT_S):
            self._handle(event)
        self._take_published()
        if not self._has_begun:
            self._has_begun = self._boots.are_enough(len(self._dispatcher.workers))
        if self._has_begun:
            self._dispatcher.num_coming = self._boots.num_coming
            for action in self._dispatcher.actions(now):
                self._do(action)
            self._check_left()

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

    def _handle(self, event: WorkerEvent) -> None:
        match event:
            case Up(worker):
                self._came_up(worker, event)
            case NotUp():
                self._boots.failed(event, len(self._dispatcher.workers))
            case Told(worker, report):
                self._hear(worker, report)
            case Gone(worker, reason):
                self._bury(worker, reason)
            case Unheard(seconds):
                self._dispatcher.unheard(seconds)
            case Lost(reason):
                self._begin_again(reason)
            case Seen(worker, is_busy):
                self._dispatcher.seen(worker, self.clock(), is_busy=is_busy)

    def _came_up(self, worker: str, event: Up) -> None:
        if not self._is_cleared:
            self.clear()
            self._is_cleared = True
        if event.ready.access != "disk":
            self._tells_late.add(worker)
        if self._boots.came_up(event):
            self._dispatcher.ready(worker, self.clock())
        else:
            self.workers.kill(worker)

    def _hear(self, worker: str, report: WorkerReport) -> None:
        for name, groups in report.segments.items():
            self._segments.note(self.job.out.segments / name, groups)
        for draft in report.drafts:
            self._publish(worker, draft)
        for answer in report.given_back:
            self._dispatcher.gave_back(worker, answer)
        for fence in report.ended:
            self._dispatcher.ended(worker, fence)
        if report.ended:
            self._losses.keep(self._dispatcher.suspects.history)
        done = report.counts.rows + report.counts.reused
        self._dispatcher.reported(
            worker, self.clock(), report.num_unadmitted, done, report.latest_fence
        )
        added = report.counts - self._counted.get(worker, Counts())
        self._counted[worker] = report.counts
        self._pools[worker] = report.pool_use
        self.progress.note(self._state())
        self.progress.update(added, None)
        self.progress.fail(added.failed)
        self.progress.reuse(added.reused)
        if report.is_over:
            self._over.add(worker)
            if report.failure is not None:
                self._fail(worker, report.failure)
            if not self._is_ending:
                why = "it was told to stop" if report.failure is None else report.failure.text
                self.log(f"{worker} has ended: {why}")
                self.workers.kill(worker)  # its process; that it is gone comes as an event

    def _fail(self, worker: str, failure: Failure) -> None:
        """Go on without a worker that failed of what may be its own: a bug that a row has hit, a
        device that broke, a disk of its node that is full.

        Raises:
            JobError: all would meet it, or nobody else is there, or to come, to go on.
        """
        if not failure.kind:
            return
        num_others = len(set(self._dispatcher.workers) - {worker})
        if failure.kind not in _OF_ITS_NODE or not self._boots.broke(worker, failure, num_others):
            if not self._is_ending:
                self._ended_by = worker, failure.text
            raise failure.error()

    def _state(self) -> str:
        """How many workers are up, and the mean use of their pools, if they have any."""
        up = self._dispatcher.workers
        pools = [use for worker in up if (use := self._pools.get(worker)) is not None]
        mean = f", their pools {sum(pools) / len(pools):.0%}" if pools else ""
        return f"{len(up)} of {self.size.workers} workers up{mean}"

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
        self._boots.start_all()
        for worker in self._dispatcher.workers:
            self._bury(worker, "its cluster is lost", died_of_row=False)

    def _bury(self, worker: str, reason: str, *, died_of_row: bool = True) -> None:
        """Take a dead worker's rows back, and have another come in its place.

        Args:
            died_of_row: whether one that it ran may be what it died of.
        """
        self.log(f"{worker} is gone: {reason}")
        self.progress.update(Counts.lost_with(self._counted.pop(worker, Counts())), None)
        in_flight, finished = self._losses.of(worker, tells_late=worker in self._tells_late)
        in_flight = in_flight if died_of_row else NO_ROWS
        with_tokens = self._losses.with_tokens(worker)
        self._dispatcher.died(worker, in_flight, finished, with_tokens)
        self._losses.keep(self._dispatcher.suspects.history, died=worker)
        self._over.add(worker)
        if not self.stop.is_set() and not self._is_ending:
            self._boots.start(len(self._dispatcher.workers), worker)

    def _do(self, action: Give | TakeBack | Look | Kill) -> None:
        match action:
            case Give(lease, given_up):
                indices = {share.part.index for share in lease.shares}
                names = tuple(path.name for path in self._segments.files_of(indices))
                tokens = self._losses.token_files(self._dispatcher.workers)
                self.workers.give(lease.worker, Assignment(lease, names, given_up, tokens))
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
        if self._ended_by is not None:
            worker, why = self._ended_by
            note_failure(self.job.out, run_id(self.run_number, worker), why)


def _missing(recovered: RecoveredRows) -> Mapping[int, Ranges]:
    """Rows that are not finished, of parts that have finished rows."""
    return {
        part.index: tuple(missing_ranges([part], recovered.finished))
        for part in recovered.parts
        if len(in_range(recovered.finished, part.rows))
    }
