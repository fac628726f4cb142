"""A lock in a file system, held by one process at a time.

The operating system frees the lock at once when its holder dies. A JSON file next to the lock
describes the holder. If several processes write to one output, each touches its JSON file every few
seconds. A process that has not touched its file for ``LAPSE_S`` seconds counts as dead, even if it
is only frozen.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil
from filelock import BaseFileLock, FileLock, Timeout

from batchinfer.console.format import printable
from batchinfer.errors import LockedError
from batchinfer.job.storage.filesystem import parse_json, storage_errors

LOCK, HOLDER = "lock", "lock.json"
HEARTBEAT_S = 15.0
LAPSE_S = 90.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HeldError(LockedError):
    """Another process holds a lock.

    Args:
        holder: the holder's description of itself; None if it is missing or its process is dead.
    """

    def __init__(self, message: str, *, hint: str, holder: object) -> None:
        super().__init__(message, hint=hint)
        self.is_alone = isinstance(holder, dict) and not holder.get("task")
        """True if the holder is a single run, which holds the lock until it ends."""


class Lock(Protocol):
    """The right to write to an output directory, held by one run at a time."""

    def held(self) -> AbstractContextManager[None]:
        """Hold the lock; its folder must exist.

        Raises:
            HeldError: another run holds the lock; the message names its process.
            StorageError: the lock's file cannot be written.
        """
        ...

    def is_free(self) -> bool:
        """Return True if no process holds the lock, or its holder was silent for ``LAPSE_S``
        seconds."""
        ...

    @property
    def fences(self) -> bool:
        """True if the lock keeps a run from writing once the run has lost the lock."""
        ...

    def holder_lives(self) -> bool | None:
        """Return True if the holder is alive, False if it has died, None if that is unknown.

        The check does not take the lock, because a run that starts during the check would find the
        lock held.
        """
        ...


class LocalLock:
    """A lock in the folder ``state`` of a file system.

    Args:
        name: path of the lock's file, relative to ``state``.
        task: the holder's task if several processes write; "" if the holder writes alone.
    """

    fences = False

    def __init__(self, state: Path, name: str = LOCK, task: str = "") -> None:
        self._state = state
        self._path = state / name
        self._holder = state / f"{name}.json"
        self._task = task

    @contextmanager
    def held(self) -> Iterator[None]:
        lock, done = self._acquire(), threading.Event()
        try:
            with storage_errors(self._holder):
                self._holder.write_text(json.dumps(this_process(self._task)))
            # LOCK is held too briefly to need a heartbeat.
            if self._task and self._path.name != LOCK:
                threading.Thread(target=self._beat_until, args=(done,), daemon=True).start()
            yield
        finally:
            done.set()
            with suppress(OSError):  # the next holder overwrites the file
                self._holder.unlink(missing_ok=True)
            lock.release()

    def is_free(self) -> bool:
        try:
            self._acquire().release()
        except HeldError:
            return self._has_lapsed()
        return True

    def _beat_until(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(self._holder)

    def _has_lapsed(self) -> bool:
        """Return True if the holder was silent for ``LAPSE_S``, by the file system's clock."""
        probe = self._holder.with_suffix(f".{os.getpid()}")
        try:
            probe.touch()
            return probe.stat().st_mtime - self._holder.stat().st_mtime > LAPSE_S
        except OSError:
            return False
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def _acquire(self) -> BaseFileLock:
        with storage_errors(self._state):
            lock = FileLock(self._path, timeout=0)
            try:
                lock.acquire()
            except Timeout:
                place, holder = printable(str(self._state.parent)), self._living_holder()
                raise HeldError(
                    f"another run is writing to {place}{named(holder)}",
                    hint="wait until it has finished, or use --output for another directory",
                    holder=holder,
                ) from None
        return lock

    def _living_holder(self) -> object:
        """Return the holder's own description; None if it is missing or the holder is dead."""
        with suppress(OSError, ValueError):
            holder = parse_json(self._holder.read_bytes())
            return None if process_lives(holder) is False else holder
        return None

    def holder_lives(self) -> bool | None:
        try:
            return process_lives(parse_json(self._holder.read_bytes()))
        except (OSError, ValueError):
            return None


def process_lives(holder: object) -> bool | None:
    """Return True if the process that ``holder`` describes is still running.

    Return None if that is unknown: the process is on another machine, or this machine was
    restarted.
    """
    try:
        if (holder["host"], holder["boot_id"]) != (socket.gethostname(), _boot_id()):  # type: ignore[index]
            return None
        return bool(_started(holder["pid"]) == holder["started"])  # type: ignore[index]
    except (TypeError, KeyError):
        return None


def this_process(task: str = "") -> dict[str, int | float | str | None]:
    """Describe this process for a lock's JSON file: id, host, boot id, start time and task."""
    pid = os.getpid()
    machine = {"host": socket.gethostname(), "boot_id": _boot_id()}
    named_task = {"task": task} if task else {}
    return {"pid": pid, **machine, "started": _started(pid), **named_task}


def _started(pid: int) -> float | None:
    """Return when a process started, in seconds since the machine booted; None if it has ended.

    The start time distinguishes processes that had the same id. A start time in seconds since 1970
    would change whenever the clock is set.
    """
    booted = psutil.boot_time()
    try:
        return round(float(psutil.Process(pid).create_time() - booted), 2)
    except psutil.NoSuchProcess:
        return None


def _boot_id() -> str:
    """Return the id of the machine's current boot; process ids are unique only within a boot."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"


def named(holder: object) -> str:
    """Return the end of a message that names the holder of a lock; "" if ``holder`` is damaged."""
    try:
        pid, host, boot = (
            printable(str(holder[key]), 80)  # type: ignore[index]
            for key in ("pid", "host", "boot_id")
        )
    except (TypeError, KeyError):
        return ""
    task = printable(str(holder.get("task") or ""), 80)  # type: ignore[attr-defined]
    return f": {task}{task and ', '}process {pid} on {host} (boot {boot})"
