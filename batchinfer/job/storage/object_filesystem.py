"""Files of an output directory in an object store, and logs that grow there.

What is staged is in memory; an object appears with all of its bytes, in the place of a rename. A
run writes over what it has written itself. Where it finds something else, it makes sure that it
still holds the lock: what it finds then is left over, and not of a run that has taken over since.
Deletes cannot be tied to what they delete, so a run looks at the lock right before each, deletes
only what it has found, and gives up before another could have taken over.
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
from batchinfer.job.storage.staged_files import StagedFiles
from batchinfer.job.storage.urls import StorePath, is_url

EVERY_S = 5.0
KEPT_BYTES = 1 << 18
"""Of the end of what was written; the rest is dropped."""

_TRIES = 5  # others are kept out by the lock: what changes between two looks is rare


class StoreLog(io.RawIOBase):
    """A log in an object store, of which the last ``KEPT_BYTES`` are kept.

    It is put there as a whole: at once after a while of silence, else when the last time was
    ``EVERY_S`` ago. What cannot be put is left: a job does not end for its log.

    Args:
        put: writes the object.
        clock: seconds.
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


class StoreFiles(StagedFiles):
    """The objects of a store as files; paths are ``StorePath``.

    Args:
        check: raises LockedError where this run no longer holds the lock, by what it last heard.
        confirm: raises LockedError where it does not, after asking the store.
    """

    flush_every_s = 60.0
    parallel_requests = 16

    def __init__(
        self, objects: Objects, check: Callable[[], None], confirm: Callable[[], None]
    ) -> None:
        super().__init__()
        self._objects = objects
        self._check = check
        self._confirm = confirm
        self._written: dict[PurePath, Version] = {}
        """Objects as this run has written them."""
        self._failure: StorageError | None = None
        """Of a write, after the store was asked for minutes: it ends the run, and is not asked for
        each of the things again that a run would still like to write at its end."""

    def append_to(self, path: PurePath) -> BinaryIO:
        """Open a log of which the end is kept, in the store some seconds later."""
        return cast(BinaryIO, StoreLog(partial(self._put_unless_failed, _url(path))))

    def open(self, path: PurePath) -> BinaryIO:
        if path in self._staged:
            return BytesIO(self._staged[path])
        try:
            return BytesIO(self._objects.get(_url(path))[0])
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Put what is staged in the store; what another has put there, in another place there."""
        staged = self._staged.get(source)
        if staged is not None:
            with self._once_only():
                self._put(_url(target), staged)
            self._staged.pop(source, None)  # another thread may have been at the same
            return
        with self.open(source) as file, self._once_only():
            self._put(_url(target), file.read())
        self.delete(source)

    def copy(self, source: PurePath, target: PurePath, staging: PurePath) -> None:
        self._check()
        with self._once_only():
            self._objects.copy(_url(source), _url(target))
        self._written.pop(target, None)

    def delete(self, path: PurePath) -> None:
        self._drop_staged(path)
        with self._once_only():
            self._delete_all(_url(path))
        for written in [written for written in list(self._written) if written.is_relative_to(path)]:
            del self._written[written]

    def _delete_all(self, path: StorePath) -> None:
        """Delete an object and what is below it; another that does the same may be ahead."""
        for _ in range(_TRIES):
            keys = self._objects.keys(path)
            if not keys:
                return
            self._check()
            if self._objects.delete(path, keys):
                return
        raise StorageError(
            f"cannot delete {printable(str(path))}: the store says that what it lists is not there",
            hint="see to the store, then run again: finished rows are kept",
        )

    def entries(self, directory: PurePath) -> list[StorePath]:
        return self._objects.entries(_url(directory))

    def stat(self, path: PurePath) -> FileStat | None:
        """Size, time and mark of an object; None where it is missing, and for folders."""
        found = self._objects.head(_url(path))
        return None if found is None else found.stat

    def holds(self, directory: PurePath, path: str) -> bool:
        return is_url(path) and StorePath(path).is_relative_to(directory)

    @contextmanager
    def _once_only(self) -> Iterator[None]:
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
            # In this order: what is there was there before this run was told that it has the lock,
            # so none that takes over later has written it.
            found = self._objects.head(path)
            self._confirm()
            seen = None if found is None else found.version
        raise StorageError(
            f"cannot write {printable(str(path))}: it changes all the time",
            hint="find out what else writes there, then run again: finished rows are kept",
        )


def _url(path: PurePath) -> StorePath:
    assert isinstance(path, StorePath)
    return path
