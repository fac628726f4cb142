"""The lock of an output directory in an object store: one run at a time may write.

``lock.json`` names the holder and a fencing number, which grows by one with each holder. Runs
create and replace this object with conditional writes, so only one of two runs gets the lock. The
holder rewrites the object every few seconds. If ``lock.json`` is older than ``LAPSE_S`` seconds by
the store's clock, its holder counts as dead, and the next run takes over.

A holder that was suspended asks the store before it writes anything, and learns that it has lost
the lock. The last requests of such a holder may arrive later, but writes are conditional (see
``object_filesystem``), so these requests cannot replace a later holder's objects. Only a delete
that arrives ``_TRUSTED_S`` or more after it was sent could hit a later holder's object.
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
"""Seconds for which a holder trusts the store's last answer; other runs wait twice as long before
they take over."""
_TRIES = 5


@dataclass(frozen=True)
class _Content:
    """The content of ``lock.json``."""

    fence: int
    token: str | None = None
    """Random text that identifies the holder; None if the lock is free."""
    beat: int = 0
    holder: dict[str, Any] | None = None


def _seconds_since_boot() -> float:
    """Seconds since this machine started, including the time in which it was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class StoreLock:
    """A lock in an object store, rewritten every few seconds while it is held.

    Args:
        state: the lock's folder.
        clock: returns the time in seconds, to measure how long ago the store last answered.
        store_time: returns seconds since 1970 by the store's clock; None to ask the store.
        name: name of the lock's object in ``state``, without ``.json``.
        task: the holder's task if several processes write; "" if the holder writes alone.
    """

    fences = True

    def __init__(
        self,
        objects: Objects,
        state: StorePath,
        clock: Callable[[], float] = _seconds_since_boot,
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
        """Version of the lock that this run wrote; None if this run does not hold the lock."""
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
        """Take the lock, without the heartbeat of ``held``.

        Raises:
            LockedError: another run holds the lock.
            StorageError: the store refuses, does not answer, or ignores the conditions of
                conditional writes.
        """
        now = self._probe()
        for _ in range(_TRIES):
            stored = self._read()
            fence, version = 1, None
            if stored is not None:
                content, meta = stored
                version = meta.version
                fence = content.fence + 1
                self._refuse_if_held(content, now - meta.stat.mtime_ns / 1e9)
            holder = {**this_process(self._task), "pids": _pid_namespace()}
            if self._write(_Content(fence, token_hex(16), 0, holder), version):
                return
        raise HeldError(
            f"other runs are starting to write to {self._place}",
            hint="wait until they have finished, or use --output for another directory",
            holder=None,
        )

    def check(self) -> None:
        """Check that this run holds the lock; ask the store unless its last answer is recent.

        Raises:
            LockedError: another run has taken over.
            StorageError: the store does not answer.
        """
        with self._mutex:
            if self._version is None or self._clock() - self._asked_at >= _TRUSTED_S:
                self.confirm()

    def confirm(self) -> None:
        """Check that this run holds the lock, by rewriting it.

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
                    f"another run has taken over {self._place}: this run, number "
                    f"{content.fence}, did not renew its lock for {LAPSE_S:.0f} s",
                    hint="let the other run continue, or stop it and run this command again",
                )

    def release(self) -> None:
        """Free the lock; if the store does not answer, the lock lapses after ``LAPSE_S``."""
        with self._mutex:
            if self._version is not None:
                with suppress(JobError):
                    self._write(_Content(self._content.fence), self._version)
            self._version = None

    def is_free(self) -> bool:
        """Return True if the lock is free, or its holder counts as dead.

        A holder that was only suspended notices later that it has lost the lock.
        """
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
        """Return True if the holder wrote recently by the local clock; None if the lock is free."""
        stored = self._read()
        if stored is None or stored[0].token is None:
            return None
        content, meta = stored
        return not (_is_dead(content.holder) or time.time() - meta.stat.mtime_ns / 1e9 > LAPSE_S)

    @property
    def _place(self) -> str:
        return printable(str(self._state.parent))

    def _refuse_if_held(self, content: _Content, age_s: float) -> None:
        if content.token is None or age_s > LAPSE_S or _is_dead(content.holder):
            return
        raise HeldError(
            f"another run is writing to {self._place}{named(content.holder)}, "
            f"which renewed its lock {max(age_s, 0.0):.0f} s ago",
            hint="wait until it has finished, or use --output for another directory; if "
            f"it has died, its lock expires {LAPSE_S:.0f} s after the last renewal",
            holder=content.holder,
        )

    def _beat_until(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_S):
            with suppress(JobError):  # the next write raises the error again
                self._beat()

    def _beat(self) -> None:
        with self._mutex:
            if self._version is not None:
                self.confirm()

    def _write(self, content: _Content, instead_of: Version | None) -> bool:
        """Replace the lock's content; return False if another run replaced it first."""
        asked_at = self._clock()
        data = json.dumps(asdict(content)).encode()
        version = self._objects.put(self._path, data, instead_of)
        if version is None:  # an earlier attempt may have succeeded although its answer was lost
            stored = self._read()
            if stored is None or stored[0] != content:
                return False
            version = stored[1].version
        self._content, self._version, self._asked_at = content, version, asked_at
        return True

    def _read(self) -> tuple[_Content, ObjectMeta] | None:
        try:
            data, meta = self._objects.get(self._path)
        except FileNotFoundError:
            return None
        try:
            fields = parse_json(data)
            return _Content(int(fields.pop("fence")), **fields), meta
        except (ValueError, TypeError, KeyError, AttributeError):
            return _Content(0, "damaged"), meta  # held by an unknown run until the lock lapses

    def _probe(self) -> float:
        """Check that the store honors conditional writes; return the store's time."""
        path = self._path.with_name(f"probe-{token_hex(8)}")
        taken = self._objects.put(path, b"", None) is not None
        refused = self._objects.put(path, b"again", None) is None
        meta = self._objects.head(path)
        self._objects.delete(path, [path.key])
        if not (taken and refused and meta):
            raise StorageError(
                f"the store of {self._place} ignores If-None-Match, so it cannot "
                "keep two runs from writing to one output",
                hint="use --output for a store that supports it, or for a local directory",
            )
        return self._store_time() if self._store_time else meta.stat.mtime_ns / 1e9


def _is_dead(holder: dict[str, Any] | None) -> bool:
    """Return True if the holder was a process in this PID namespace and has ended."""
    return (holder or {}).get("pids") == _pid_namespace() and process_lives(holder) is False


def _pid_namespace() -> str:
    """Return the id of this process's PID namespace: a container sees only its own processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
