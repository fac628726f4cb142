"""A lock in a file system: one process at a time holds it.

The lock is the operating system's: it is free at once when its holder dies, however it dies. The
file beside it tells others who holds it. Of several processes that write beside each other, each
touches that file every few seconds: one that was not heard of for ``LAPSE_S`` counts as dead, even
if it is only frozen.
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
    """A lock is held by another process.

    Args:
        holder: what that has said of itself; None: nothing, or what a dead one has said.
    """

    def __init__(self, message: str, *, hint: str, holder: object) -> None:
        super().__init__(message, hint=hint)
        self.is_alone = isinstance(holder, dict) and not holder.get("task")
        """Whether it is known to write alone, and so to hold the lock for as long as it does."""


class Lock(Protocol):
    """The right to write to an output directory, of one run at a time."""

    def held(self) -> AbstractContextManager[None]:
        """Hold it; the folder it is in is there.

        Raises:
            HeldError: another run holds it; names its process.
            StorageError: it cannot be written to.
        """
        ...

    def is_free(self) -> bool:
        """Whether nobody holds it; a holder that was not heard of for long has lost it.

        Raises:
            StorageError: it cannot be written to.
        """
        ...

    @property
    def fences(self) -> bool:
        """Whether who has lost it is kept from writing by the lock itself."""
        ...

    def holder_lives(self) -> bool | None:
        """Whether a process is known to hold it, or is known to have died with it; None: neither.

        The lock itself is not tried: a run that begins just then would find it held.
        """
        ...


class LocalLock:
    """A lock in the folder ``state`` of a file system.

    Args:
        name: its file, which may be in a folder there.
        task: what its holder does, of several that write; "": the holder writes alone.
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
            if self._task and self._path.name != LOCK:  # that is held for a moment only
                threading.Thread(target=self._beat_until, args=(done,), daemon=True).start()
            yield
        finally:
            done.set()
            with suppress(OSError):  # the next holder writes its own
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
        """Whether the holder was not heard of for long, by the file system's own clock."""
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
                    hint="wait for it, or use --output for another directory",
                    holder=holder,
                ) from None
        return lock

    def _living_holder(self) -> object:
        """What the holder says of itself; None if it has not yet, and a dead one has."""
        with suppress(OSError, ValueError):
            found = parse_json(self._holder.read_bytes())
            return None if process_lives(found) is False else found
        return None

    def holder_lives(self) -> bool | None:
        """Whether the holder's process runs; None: it is on another machine, or nobody holds it."""
        try:
            return process_lives(parse_json(self._holder.read_bytes()))
        except (OSError, ValueError):
            return None


def process_lives(found: object) -> bool | None:
    """Whether a process that ``this_process`` described still runs.

    None where that cannot be told: it was on another machine, or this one has started anew.
    """
    try:
        if (found["host"], found["boot_id"]) != (socket.gethostname(), _boot_id()):  # type: ignore[index]
            return None
        return bool(_started(found["pid"]) == found["started"])  # type: ignore[index]
    except (TypeError, KeyError):
        return None


def this_process(task: str = "") -> dict[str, int | float | str | None]:
    """This process as a lock names it: id, host, boot, seconds at which it began, what it does."""
    pid = os.getpid()
    machine = {"host": socket.gethostname(), "boot_id": _boot_id()}
    named_task = {"task": task} if task else {}
    return {"pid": pid, **machine, "started": _started(pid), **named_task}


def _started(pid: int) -> float | None:
    """Time at which a process began, which tells it from others of its id; None if it ended.

    Seconds since the machine did: the time of day is that plus what the clock says of the
    machine's own beginning, which changes whenever the clock is set.
    """
    booted = psutil.boot_time()
    try:
        return round(float(psutil.Process(pid).create_time() - booted), 2)
    except psutil.NoSuchProcess:
        return None


def _boot_id() -> str:
    """Name of this boot of the machine; another boot gives the same process ids again."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"


def named(found: object) -> str:
    """A process that ``this_process`` described, for the end of a message; "" if damaged."""
    try:
        pid, host, boot = (
            printable(str(found[key]), 80)  # type: ignore[index]
            for key in ("pid", "host", "boot_id")
        )
    except (TypeError, KeyError):
        return ""
    task = printable(str(found.get("task") or ""), 80)  # type: ignore[attr-defined]
    return f": {task}{task and ', '}process {pid} on {host} (boot {boot})"
