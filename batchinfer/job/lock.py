"""Who may write to an output directory: one run at a time.

The lock is the operating system's: it is free at once when its holder dies, however it dies. The
file beside it only tells others who holds it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from batchinfer.errors import LockedError
from batchinfer.job.files import storage_errors
from batchinfer.job.messages import printable

LOCK, HOLDER = "lock", "lock.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the lock in the folder ``state``, which is there.

    Raises:
        LockedError: another run holds it; names its process.
        StorageError: it cannot be written to.
    """
    holder = state / HOLDER
    with storage_errors(state):
        lock = FileLock(state / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise LockedError(
                f"another run is writing to {printable(str(state.parent))}{_held_by(holder)}",
                hint="wait for it, or use --output for another directory",
            ) from None
    try:
        with storage_errors(holder):
            holder.write_text(json.dumps(_this_process()))
        yield
    finally:
        with suppress(OSError):  # the next holder writes its own
            holder.unlink(missing_ok=True)
        lock.release()


def holder_is_dead(state: Path) -> bool:
    """Whether the last to hold the lock was a process of this machine's, and is no more.

    False also where that cannot be told: it was on another machine, or let go in order. The lock
    itself is not tried: a run that begins just then would find it held.
    """
    try:
        found = json.loads((state / HOLDER).read_bytes())
        machine = (found["host"], found["boot_id"])
        is_here = machine == (socket.gethostname(), _boot_id())
        return is_here and _started(found["pid"]) != found["started"]
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _this_process() -> dict[str, int | float | str | None]:
    pid = os.getpid()
    machine = {"host": socket.gethostname(), "boot_id": _boot_id()}
    return {"pid": pid, **machine, "started": _started(pid)}


def _started(pid: int) -> float | None:
    """When a process began, which tells it from an earlier one of the same id; None if it ended.

    Seconds since the machine did: the time of day is that plus what the clock says of the
    machine's own beginning, which changes whenever the clock is set.
    """
    booted = psutil.boot_time()
    try:
        return round(float(psutil.Process(pid).create_time() - booted), 2)
    except psutil.NoSuchProcess:
        return None


def _boot_id() -> str:
    """Tells a boot of this machine from its others, which give the same process ids again."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"


def _held_by(holder: Path) -> str:
    try:
        found = json.loads(holder.read_bytes())
        pid, host, boot = (printable(str(found[key]), 80) for key in ("pid", "host", "boot_id"))
    except (OSError, ValueError, TypeError, KeyError):
        return ""  # it has the lock, and has not written this yet
    return f": process {pid} on {host} (boot {boot})"
