"""The launcher of a fleet: starts workers, shows their progress, and replaces workers that die.

Workers claim parts in the output directory themselves. The launcher computes no rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from batchinfer import errors
from batchinfer.console.meter import Counts
from batchinfer.console.progress_bar import Progress
from batchinfer.errors import DeviceError, ExitCode, JobError, StorageError
from batchinfer.job.fleet.local_workers import WorkerHandle

STOP_S = 8.0
"""Seconds that workers get to write everything to disk when the job stops."""
SILENT_S = 90.0
"""Seconds without a message after which a worker that runs rows counts as frozen and is killed."""
MOST_DEATHS = 12
"""Maximum number of consecutive worker deaths without a finished row. After one more death, the
launcher gives up, because the machine is probably at fault.
"""
MOST_FAILED_STARTS = 2
"""Number of consecutive failed starts after which a worker is not started again."""
_POLL_S = 0.05
_NODE_ERRORS = {DeviceError.__name__, StorageError.__name__}
"""Names of errors that may be due to one node, so workers on other nodes can go on."""


@dataclass
class _Slot:
    handle: WorkerHandle
    is_up: bool = False
    may_run: bool = False
    failed_starts: int = 0
    heard_at: float = 0.0
    counts: Counts = field(default_factory=Counts)
    pool: float | None = None
    failure: tuple[str, str] | None = None
    """Type and text of the error that ended the worker."""


@dataclass
class Launcher:
    """Starts ``num_workers`` workers and keeps them running.

    Args:
        start: starts the worker with the given number, counted from 0.
        min_workers: rows start once this many workers have loaded the model.
        is_complete: returns True once all parts are finished.
        log: writes a line about a worker to the log.
        on_begin: called when the first rows start.
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
        """Run workers until all parts are finished; return False if ``stop`` was set first.

        Raises:
            JobError: no worker can be started, or a worker failed for a reason that applies to all
                workers.
        """
        try:
            for number in range(self.num_workers):
                self._slots[number] = _Slot(self.start(number))
            while self._slots and not self.stop.wait(_POLL_S):
                for number, slot in list(self._slots.items()):
                    self._poll(number, slot)
                self._begin_if_enough()
            if not self.stop.is_set() and not self.is_complete():
                raise self._error("no worker is running")
        finally:
            self._end()
        return self.is_complete()

    def _poll(self, number: int, slot: _Slot) -> None:
        messages, code = slot.handle.poll()
        for message in messages:
            slot.heard_at = time.monotonic()
            if "up" in message:
                self._came_up(number, slot, message["up"])
            elif "again" in message:
                slot.may_run = False
                self.log(f"worker {number + 1} reloads the model with the job's kernels")
            elif "counts" in message:
                self._count(slot, message)
            elif "failure" in message:
                slot.failure = message["failure"]["kind"], message["failure"]["text"]
        if code is None and slot.may_run and time.monotonic() - slot.heard_at > SILENT_S:
            self.log(f"killed worker {number + 1}: it sent no message for {SILENT_S:.0f} s")
            slot.handle.kill()
            code = -9
        if code is not None:
            self._ended(number, slot, code)

    def _came_up(self, number: int, slot: _Slot, up: Mapping[str, object]) -> None:
        slot.is_up, slot.failed_starts = True, 0
        self.log(f"worker {number + 1} is running on {up['device']}")
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
                f"only {len(up)} workers started within scale.start_timeout; scale.min_workers is "
                f"{self.min_workers}",
                hint="add nodes to the cluster, lower scale.min_workers or raise "
                "scale.start_timeout",
            )

    def _count(self, slot: _Slot, message: Mapping[str, Any]) -> None:
        counts = Counts(**message["counts"])
        added, slot.counts, slot.pool = counts - slot.counts, counts, message["pool"]
        if added.rows or added.reused:
            self._deaths = 0
        pools = [slot.pool for slot in self._slots.values() if slot.pool is not None]
        mean = f", KV pools {sum(pools) / len(pools):.0%} full" if pools else ""
        num_up = sum(slot.is_up for slot in self._slots.values())
        self.progress.note(f"{num_up} of {self.num_workers} workers running{mean}")
        self.progress.update(added, None)
        self.progress.fail(added.failed)
        self.progress.reuse(added.reused)

    def _ended(self, number: int, slot: _Slot, code: int) -> None:
        """Replace a worker that has ended, or continue without it. Raise JobError if every worker
        would fail in the same way."""
        last_line = slot.failure[1] if slot.failure else slot.handle.last_line()
        slot.handle.kill()
        del self._slots[number]
        self.progress.update(Counts.lost_with(slot.counts), None)
        if code == ExitCode.OK:
            return
        why = last_line if slot.failure else f"exit status {code}{last_line and ': '}{last_line}"
        self.log(f"worker {number + 1} ended: {why}")
        if self.stop.is_set():
            return
        self._latest_failure = slot.failure or (DeviceError.__name__, why)
        if slot.failure is not None:
            kind = slot.failure[0]
            if kind in _NODE_ERRORS:
                if self._slots:
                    return
                raise self._error("no worker is running")
            if kind != errors.LockedError.__name__ or not slot.is_up:
                raise self._error("")
        failed_starts = 0 if slot.is_up else slot.failed_starts + 1
        self._deaths += 1
        if failed_starts >= MOST_FAILED_STARTS:
            if not self._slots:
                raise self._error("no worker could be started")
            return
        if self._deaths > MOST_DEATHS:
            raise self._error("workers keep dying before they finish a row")
        self._slots[number] = _Slot(self.start(number), failed_starts=failed_starts)

    def _error(self, what: str) -> JobError:
        kind, text = self._latest_failure
        error: type[JobError] = getattr(errors, kind or DeviceError.__name__)
        return error(f"{what}: {text}" if what else text)

    def _end(self) -> None:
        """Stop all workers, which write their finished rows; kill workers that take too long."""
        until = time.monotonic() + STOP_S
        for slot in self._slots.values():
            slot.handle.stop()
        while self._slots and time.monotonic() < until:
            for number, slot in list(self._slots.items()):
                messages, code = slot.handle.poll()
                for message in messages:
                    if "counts" in message:
                        self._count(slot, message)
                if code is not None:
                    slot.handle.kill()
                    del self._slots[number]
            time.sleep(_POLL_S)
        for slot in self._slots.values():
            slot.handle.kill()
