"""Stores the files of an output directory, including growing logs, in an object store.

Staged files are kept in memory, and a rename uploads them whole. A run may overwrite objects that
it wrote itself. Before a run overwrites any other version of an object, the run confirms that it
still holds the lock, which shows that an earlier run left this version behind. Because a store has
no conditional deletes, a run checks the lock before each delete, deletes only objects that it has
listed, and fails before another run could have taken over.
"""

from __future__ import annotations

import errno
import io
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import PurePath
from typing import Any, BinaryIO, cast

from batchinfer.console.format import printable
from batchinfer.errors import JobError, StorageError
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.object_store import Objects, Version
from batchinfer.job.storage.urls import StorePath, is_url

EVERY_S = 5.0
KEPT_BYTES = 1 << 18
"""Number of bytes to keep from the end of a log."""

_TRIES = 5
"""Number of times to try to write or delete objects that another writer changes at the same time,
which is rare, because the lock keeps other runs from writing."""


class StoreLog(io.RawIOBase):
    """A log in an object store that keeps its last ``KEPT_BYTES``.

    The log is uploaded whole, at most every ``EVERY_S`` seconds. Failed uploads are ignored,
    because a job must not fail because of its log.

    Args:
        put: uploads the log.
    """

    def __init__(
        self, put: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = put
        self._clock = clock
        self._content = bytearray()
        self._changed = False
        self._put_at = -math.inf
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._mutex:
            self._content += data
            del self._content[:-KEPT_BYTES]
            self._changed = True
            if self._clock() - self._put_at >= EVERY_S:
                self._put()
        return len(data)

    def flush(self) -> None:
        with self._mutex:
            self._put()

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self.flush()
        super().close()

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            with self._mutex:
                self._put()

    def _put(self) -> None:
        if self._changed:
            with suppress(JobError):
                self._store(bytes(self._content))
            self._changed = False
            self._put_at = self._clock()


class StoreFiles:
    """Gives access to the objects of a store as files; paths are ``StorePath``.

    Args:
        check: raises LockedError if this run has lost the lock; uses the store's last answer if
            that answer is recent.
        confirm: asks the store, and raises LockedError if this run has lost the lock.
    """

    flush_every_s = 60.0
    parallel_requests = 16

    def __init__(
        self, objects: Objects, check: Callable[[], None], confirm: Callable[[], None]
    ) -> None:
        self._objects = objects
        self._check = check
        self._confirm = confirm
        self._staged: dict[PurePath, bytes] = {}
        self._written: dict[PurePath, Version] = {}
        """Versions of the objects that this run has written."""
        self._failure: StorageError | None = None
        """The first failure, after minutes of retries. This failure ends the run, and further
        writes raise it again at once, so that the run does not wait minutes for each of its last
        files."""

    def write(self, path: PurePath, data: bytes) -> None:
        self._staged[path] = data

    def create(self, path: PurePath) -> BinaryIO:
        return _StagedFile(partial(self.write, path))

    def sync(self, path: PurePath) -> None:
        """Do nothing: uploaded objects are durable."""

    def make_directory(self, path: PurePath) -> None:
        """Do nothing: a store has no folders."""

    def can_write(self, directory: PurePath) -> bool:
        """Return True, because only a write shows whether the store allows writes."""
        return True

    def append_to(self, path: PurePath) -> BinaryIO:
        """Open a ``StoreLog``."""
        return cast(BinaryIO, StoreLog(partial(self._put_unless_failed, _url(path))))

    def open(self, path: PurePath) -> BinaryIO:
        if path in self._staged:
            return BytesIO(self._staged[path])
        try:
            return BytesIO(self._objects.get(_url(path))[0])
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Upload a staged file, or copy an object and delete the original."""
        staged = self._staged.get(source)
        if staged is not None:
            with self._failing_fast():
                self._put(_url(target), staged)
            self._staged.pop(source, None)  # another thread may have removed it
            return
        with self.open(source) as file, self._failing_fast():
            self._put(_url(target), file.read())
        self.delete(source)

    def copy(self, source: PurePath, target: PurePath, staging: PurePath) -> None:
        self._check()
        with self._failing_fast():
            self._objects.copy(_url(source), _url(target))
        self._written.pop(target, None)

    def delete(self, path: PurePath) -> None:
        _forget(self._staged, path)
        with self._failing_fast():
            self._delete_all(_url(path))
        _forget(self._written, path)

    def _delete_all(self, path: StorePath) -> None:
        """Delete an object and all objects below it, even while other writers delete them."""
        for _ in range(_TRIES):
            keys = self._objects.keys(path)
            if not keys:
                return
            self._check()
            if self._objects.delete(path, keys):
                return
        raise StorageError(
            f"cannot delete {printable(str(path))}: the store lists objects that it does not hold",
            hint="check the store, then run again; finished rows are kept",
        )

    def entries(self, directory: PurePath) -> list[StorePath]:
        return self._objects.entries(_url(directory))

    def stat(self, path: PurePath) -> FileStat | None:
        """Return an object's metadata; None for missing objects and for folders."""
        meta = self._objects.head(_url(path))
        return None if meta is None else meta.stat

    def holds(self, directory: PurePath, path: str) -> bool:
        return is_url(path) and StorePath(path).is_relative_to(directory)

    @contextmanager
    def _failing_fast(self) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except StorageError as error:
            self._failure = error
            raise

    def _put_unless_failed(self, path: StorePath, data: bytes) -> None:
        if self._failure is None:
            self._put(path, data)

    def _put(self, path: StorePath, data: bytes) -> None:
        self._check()
        seen = self._written.get(path)
        for _ in range(_TRIES):
            written = self._objects.put(path, data, seen)
            if written is not None:
                self._written[path] = written
                return
            # Confirm the lock after reading the version: if this run still holds the lock then, the
            # object does not belong to a run that took over.
            meta = self._objects.head(path)
            self._confirm()
            seen = None if meta is None else meta.version
        raise StorageError(
            f"cannot write {printable(str(path))}: another program keeps changing it",
            hint="stop the other program, then run again; finished rows are kept",
        )


class _StagedFile(BytesIO):
    """A file in memory whose content goes to ``keep`` when it is closed."""

    def __init__(self, keep: Callable[[bytes], None]) -> None:
        super().__init__()
        self._keep = keep

    def close(self) -> None:
        if not self.closed:
            self._keep(self.getvalue())
        super().close()


def _forget(paths: dict[PurePath, Any], folder: PurePath) -> None:
    """Remove all paths below a folder; other threads may remove some at the same time."""
    for path in list(paths):
        if path.is_relative_to(folder):
            paths.pop(path, None)


def _url(path: PurePath) -> StorePath:
    assert isinstance(path, StorePath)
    return path
