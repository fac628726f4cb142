"""The lock of an output directory on this machine: one run at a time may write.

The lock is the operating system's: it is free at once when its holder dies, however it dies. The
file beside it only tells others who holds it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil
from filelock import FileLock, Timeout

from batchinfer.console.format import printable
from batchinfer.errors import LockedError
from batchinfer.job.storage.filesystem import parse_json, storage_errors

LOCK, HOLDER = "lock", "lock.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Lock(Protocol):
    """The right to write to an output directory, of one run at a time."""

    def held(self) -> AbstractContextManager[None]:
        """Hold it; the folder it is in is there.

        Raises:
            LockedError: another run holds it; names its process.
            StorageError: it cannot be written to.
        """
        ...

    def holder_lives(self) -> bool | None:
        """Whether a process is known to hold it, or is known to have died with it; None: neither.

        The lock itself is not tried: a run that begins just then would find it held.
        """
        ...


class LocalLock:
    """A lock in the folder ``state`` of this machine's file system."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._holder = state / HOLDER

    @contextmanager
    def held(self) -> Iterator[None]:
        with storage_errors(self._state):
            lock = FileLock(self._state / LOCK, timeout=0)
            try:
                lock.acquire()
            except Timeout:
                place, by = printable(str(self._state.parent)), _held_by(self._holder)
                raise LockedError(
                    f"another run is writing to {place}{by}",
                    hint="wait for it, or use --output for another directory",
                ) from None
        try:
            with storage_errors(self._holder):
                self._holder.write_text(json.dumps(this_process()))
            yield
        finally:
            with suppress(OSError):  # the next holder writes its own
                self._holder.unlink(missing_ok=True)
            lock.release()

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


def this_process() -> dict[str, int | float | str | None]:
    """This process as a lock names it: id, host, boot, seconds at which it began."""
    pid = os.getpid()
    machine = {"host": socket.gethostname(), "boot_id": _boot_id()}
    return {"pid": pid, **machine, "started": _started(pid)}


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


def _held_by(holder: Path) -> str:
    try:
        return named(parse_json(holder.read_bytes()))
    except (OSError, ValueError):
        return ""  # it has the lock, and has not written this yet


def named(found: object) -> str:
    """A process that ``this_process`` described, for the end of a message; "" if damaged."""
    try:
        pid, host, boot = (
            printable(str(found[key]), 80)  # type: ignore[index]
            for key in ("pid", "host", "boot_id")
        )
    except (TypeError, KeyError):
        return ""
    return f": process {pid} on {host} (boot {boot})"
