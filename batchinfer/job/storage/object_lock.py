"""The lock of an output directory in an object store: one run at a time may write.

``lock.json`` names its holder and a fencing number, which grows by one with each holder. It is made
only where there is none, and changed only by who has seen what it takes the place of, so of two
runs one gets it. The holder writes it again every few seconds. When it was not written for
``LAPSE_S``, by the store's own clock, its holder is taken for dead, and the next run takes over.

A holder that was only asleep asks the store before it writes anything, and finds that it was
passed. What it had sent off just before arrives after that at worst: ``store_files`` sees to it
that this takes the place of nothing that a later holder has written. Only a delete that the store
gets ``_TRUSTED_S`` after it was sent could hit a later holder's object.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from secrets import token_hex
from typing import Any

from batchinfer.console.format import printable
from batchinfer.errors import JobError, LockedError, StorageError
from batchinfer.job.storage.filesystem import parse_json
from batchinfer.job.storage.local_lock import (
    HEARTBEAT_S,
    LAPSE_S,
    LOCK,
    HeldError,
    named,
    process_lives,
    this_process,
)
from batchinfer.job.storage.object_store import ObjectMeta, Objects, Version
from batchinfer.job.storage.urls import StorePath

_TRUSTED_S = LAPSE_S / 2
"""How long what the store has said of the lock holds: others wait twice as long."""
_TRIES = 5


@dataclass(frozen=True)
class _Content:
    """The content of ``lock.json``."""

    fence: int
    token: str | None = None
    """Unique to a holder; None: nobody holds it."""
    beat: int = 0
    holder: dict[str, Any] | None = None


def _awake_or_not() -> float:
    """Seconds since this machine was started, those included in which it slept."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class StoreLock:
    """A lock in an object store, written again every few seconds while it is held.

    Args:
        state: the folder the lock is in.
        clock: seconds of this machine, to tell how long ago the store was asked.
        store_time: seconds since 1970 by the store's clock; None: asks it.
        name: its object there, without ``.json``.
        task: what its holder does, of several that write; "": the holder writes alone.
    """

    fences = True

    def __init__(
        self,
        objects: Objects,
        state: StorePath,
        clock: Callable[[], float] = _awake_or_not,
        store_time: Callable[[], float] | None = None,
        name: str = LOCK,
        task: str = "",
    ) -> None:
        self._objects = objects
        self._state = state
        self._path = state / f"{name}.json"
        self._task = task
        self._clock = clock
        self._store_time = store_time
        self._content = _Content(0)
        self._version: Version | None = None
        """Of the lock as this run wrote it; None where it does not hold it."""
        self._asked_at = 0.0
        self._mutex = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.acquire()
        done = threading.Event()
        heart = threading.Thread(target=self._beat_until, args=(done,), daemon=True)
        heart.start()
        try:
            yield
        finally:
            done.set()
            heart.join()
            self.release()

    def acquire(self) -> None:
        """Take the lock; ``held`` also keeps it.

        Raises:
            LockedError: another run has it.
            StorageError: the store refuses, does not answer, or does not know conditions.
        """
        now = self._probe()
        for _ in range(_TRIES):
            found = self._read()
            fence, version = 1, None
            if found is not None:
                content, meta = found
                version = meta.version
                fence = content.fence + 1
                self._refuse_if_held(content, now - meta.stat.mtime_ns / 1e9)
            mine = _Content(fence, token_hex(16), 0, _holder(self._task))
            if self._write(mine, version):
                return
        raise HeldError(
            f"other runs are beginning to write to {self._place}",
            hint="wait for them, or use --output for another directory",
            holder=None,
        )

    def check(self) -> None:
        """Make sure that this run holds the lock, by what the store said a short while ago.

        Raises:
            LockedError: another run has taken over.
            StorageError: the store does not answer.
        """
        with self._mutex:
            if self._version is None or self._clock() - self._asked_at >= _TRUSTED_S:
                self.confirm()

    def confirm(self) -> None:
        """Make sure that this run holds the lock: write it again.

        Raises:
            LockedError: another run has taken over.
            StorageError: the store does not answer.
        """
        with self._mutex:
            content, version = self._content, self._version
            beat = replace(content, beat=content.beat + 1)
            if version is None or not self._write(beat, version):
                self._version = None
                raise LockedError(
                    f"another run has taken over {self._place}: this one, number "
                    f"{content.fence}, was not heard of for {LAPSE_S:.0f} s",
                    hint="let that one go on, or stop it and run this command again",
                )

    def release(self) -> None:
        """Let the next run in at once; where that fails, the lock lapses."""
        with self._mutex:
            if self._version is not None:
                with suppress(JobError):
                    self._write(_Content(self._content.fence), self._version)
            self._version = None

    def is_free(self) -> bool:
        """Whether nobody holds it; a holder that was only asleep will find itself passed."""
        lives = self.holder_lives()
        if lives is not False:
            return lives is None
        try:
            self.acquire()
        except HeldError:
            return False
        self.release()
        return True

    def holder_lives(self) -> bool | None:
        """Whether the holder was heard of lately, by the clock here; None: nobody holds it."""
        found = self._read()
        if found is None or found[0].token is None:
            return None
        content, meta = found
        return not (_is_dead(content.holder) or time.time() - meta.stat.mtime_ns / 1e9 > LAPSE_S)

    @property
    def _place(self) -> str:
        return printable(str(self._state.parent))

    def _refuse_if_held(self, content: _Content, age_s: float) -> None:
        if content.token is None or age_s > LAPSE_S or _is_dead(content.holder):
            return
        raise HeldError(
            f"another run is writing to {self._place}{named(content.holder)}, "
            f"last heard of {max(age_s, 0.0):.0f} s ago",
            hint="wait for it, or use --output for another directory; if it died, its lock "
            f"lapses {LAPSE_S:.0f} s after that",
            holder=content.holder,
        )

    def _beat_until(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_S):
            with suppress(JobError):  # whoever wants to write next meets it
                self._beat()

    def _beat(self) -> None:
        with self._mutex:
            if self._version is not None:
                self.confirm()

    def _write(self, content: _Content, instead_of: Version | None) -> bool:
        """Replace what the lock holds; False where another has replaced it first."""
        asked_at = self._clock()
        data = json.dumps(asdict(content)).encode()
        version = self._objects.put(self._path, data, instead_of)
        if version is None:  # or the answer to the first of several tries was lost
            found = self._read()
            if found is None or found[0] != content:
                return False
            version = found[1].version
        self._content, self._version, self._asked_at = content, version, asked_at
        return True

    def _read(self) -> tuple[_Content, ObjectMeta] | None:
        try:
            data, found = self._objects.get(self._path)
        except FileNotFoundError:
            return None
        try:
            fields = parse_json(data)
            return _Content(int(fields.pop("fence")), **fields), found
        except (ValueError, TypeError, KeyError, AttributeError):
            return _Content(0, "damaged"), found  # somebody's; it lapses

    def _probe(self) -> float:
        """The store's time, once it has taken, refused and deleted an object as asked."""
        path = self._path.with_name(f"probe-{token_hex(8)}")
        taken = self._objects.put(path, b"", None) is not None
        refused = self._objects.put(path, b"again", None) is None
        found = self._objects.head(path)
        self._objects.delete(path, [path.key])
        if not (taken and refused and found):
            raise StorageError(
                f"the store of {self._place} does not heed If-None-Match, which keeps two runs "
                "from writing to one output",
                hint="use --output for a store that does, or for a local directory",
            )
        return self._store_time() if self._store_time else found.stat.mtime_ns / 1e9


def _holder(task: str = "") -> dict[str, Any]:
    return {**this_process(task), "pids": _pid_namespace()}


def _is_dead(holder: dict[str, Any] | None) -> bool:
    """Whether a holder was a process among this one's, and is no more."""
    return (holder or {}).get("pids") == _pid_namespace() and process_lives(holder) is False


def _pid_namespace() -> str:
    """Tells apart containers of one machine, whose processes do not see each other."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
