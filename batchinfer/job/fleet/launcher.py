"""The launcher of a fleet: starts workers, shows their progress, starts others for those that die.

Who makes what is for the workers, which claim parts in the output directory. The launcher makes no
part, and ends the job when all are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event

from batchinfer import errors
from batchinfer.console.meter import Counts
from batchinfer.console.progress import Progress
from batchinfer.errors import DeviceError, ExitCode, JobError, StorageError
from batchinfer.job.fleet.local_workers import WorkerHandle
from batchinfer.job.fleet.worker_process import counts_of

STOP_S = 8.0
"""How long workers have to put everything on disk when the job stops."""
SILENT_S = 90.0
"""A worker that is up and tells nothing for so long is frozen: it is killed."""
MOST_DEATHS = 12
"""Of workers, one after the other, without a row finished in between: the machine is at fault."""
BOOTS = 2
"""Times in a row that a worker may fail to come up."""
_POLL_S = 0.05
_OF_ITS_NODE = {DeviceError.__name__, StorageError.__name__}
"""What a worker may fail of that others do not: its device, its disk."""


@dataclass
class _Slot:
    """One of the workers there are to be."""

    handle: WorkerHandle
    is_up: bool = False
    may_run: bool = False
    failed_boots: int = 0
    heard_at: float = 0.0
    counts: Counts = field(default_factory=Counts)
    pool: float | None = None
    failure: tuple[str, str] | None = None
    """Kind and text of the error that it ended with."""


@dataclass
class Launcher:
    """Starts as many workers as there are to be, and keeps them running.

    Args:
        start: starts the worker of a number, counted from 0.
        min_workers: rows run as soon as so many are up.
        is_complete: whether all parts are made.
        log: takes a line about workers.
        on_begin: called when rows begin to run.
    """

    start: Callable[[int], WorkerHandle]
    num_workers: int
    min_workers: int
    start_timeout_s: float
    is_complete: Callable[[], bool]
    progress: Progress
    stop: Event
    log: Callable[[str], None]
    on_begin: Callable[[], None]

    def __post_init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._has_begun = False
        self._began = self._last_up = time.monotonic()
        self._deaths = 0
        self._latest_failure: tuple[str, str] = ("", "")

    def run(self) -> bool:
        """Have all parts made; False where it was asked to stop before.

        Raises:
            JobError: no worker can be started, or one met what all would.
        """
        try:
            for number in range(self.num_workers):
                self._slots[number] = _Slot(self.start(number))
            while self._slots and not self.stop.wait(_POLL_S):
                for number, slot in list(self._slots.items()):
                    self._look(number, slot)
                self._begin_if_enough()
            if not self.stop.is_set() and not self.is_complete():
                raise self._error("no worker is left")
        finally:
            self._end()
        return self.is_complete()

    def _look(self, number: int, slot: _Slot) -> None:
        messages, code = slot.handle.poll()
        for message in messages:
            slot.heard_at = time.monotonic()
            if "up" in message:
                self._came_up(number, slot, message["up"])
            elif "again" in message:
                slot.may_run = False
                self.log(f"worker {number + 1} loads again, with the kernels of the job")
            elif "counts" in message:
                self._count(slot, counts_of(message), message["pool"])
            elif "failure" in message:
                slot.failure = message["failure"]["kind"], message["failure"]["text"]
        if code is None and slot.may_run and time.monotonic() - slot.heard_at > SILENT_S:
            self.log(f"worker {number + 1} is killed: it has told nothing for {SILENT_S:.0f} s")
            slot.handle.kill()
            code = -9
        if code is not None:
            self._ended(number, slot, code)

    def _came_up(self, number: int, slot: _Slot, up: Mapping[str, object]) -> None:
        slot.is_up, slot.failed_boots = True, 0
        self.log(f"worker {number + 1} is up: {up['device']}")
        if self._has_begun:
            slot.may_run = True
            slot.handle.send("go")

    def _begin_if_enough(self) -> None:
        up = [slot for slot in self._slots.values() if slot.is_up]
        now = time.monotonic()
        if up:
            self._last_up = now
        if self._has_begun or not self._slots:
            return
        if len(up) >= min(self.min_workers, self.num_workers):
            self._has_begun = True
            self.on_begin()
            for slot in up:
                slot.may_run, slot.heard_at = True, now
                slot.handle.send("go")
        elif now - self._began > self.start_timeout_s:
            raise DeviceError(
                f"{len(up)} of scale.min_workers {self.min_workers} came up within "
                "scale.start_timeout",
                hint="give the cluster more nodes, or the job more time",
            )

    def _count(self, slot: _Slot, counts: Counts, pool: float | None) -> None:
        added, slot.counts, slot.pool = counts - slot.counts, counts, pool
        if added.rows or added.reused:
            self._deaths = 0
        pools = [one.pool for one in self._slots.values() if one.pool is not None]
        mean = f", their pools {sum(pools) / len(pools):.0%}" if pools else ""
        num_up = sum(one.is_up for one in self._slots.values())
        self.progress.note(f"{num_up} of {self.num_workers} workers up{mean}")
        self.progress.update(added, None)
        self.progress.fail(added.failed)
        self.progress.reuse(added.reused)

    def _ended(self, number: int, slot: _Slot, code: int) -> None:
        """Go on without a worker, or start another one in its place.

        Raises:
            JobError: all would meet what it met.
        """
        words = slot.failure[1] if slot.failure else slot.handle.last_words()
        slot.handle.kill()
        del self._slots[number]
        self.progress.update(Counts.lost_with(slot.counts), None)
        if code == ExitCode.OK:
            return
        why = words if slot.failure else f"exit status {code}{words and ': '}{words}"
        self.log(f"worker {number + 1} has ended: {why}")
        if self.stop.is_set():
            return
        self._latest_failure = slot.failure or (DeviceError.__name__, why)
        if slot.failure is not None:
            kind = slot.failure[0]
            if kind in _OF_ITS_NODE:
                if self._slots:
                    return
                raise self._error("no worker is left")
            if kind != errors.LockedError.__name__ or not slot.is_up:
                raise self._error("")
        failed_boots = 0 if slot.is_up else slot.failed_boots + 1
        self._deaths += 1
        if failed_boots >= BOOTS:
            if not self._slots:
                raise self._error("no worker could be started")
            return
        if self._deaths > MOST_DEATHS:
            raise self._error("workers die before a row is finished")
        self._slots[number] = _Slot(self.start(number), failed_boots=failed_boots)

    def _error(self, what: str) -> JobError:
        kind, text = self._latest_failure
        error: type[JobError] = getattr(errors, kind or DeviceError.__name__)
        return error(f"{what}: {text}" if what else text)

    def _end(self) -> None:
        """Have all workers put what they have on disk; kill those that take long."""
        until = time.monotonic() + STOP_S
        for slot in self._slots.values():
            slot.handle.stop()
        while self._slots and time.monotonic() < until:
            for number, slot in list(self._slots.items()):
                messages, code = slot.handle.poll()
                for message in messages:
                    if "counts" in message:
                        self._count(slot, counts_of(message), message["pool"])
                if code is not None:
                    slot.handle.kill()
                    del self._slots[number]
            time.sleep(_POLL_S)
        for slot in self._slots.values():
            slot.handle.kill()
