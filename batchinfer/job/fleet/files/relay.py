"""Files of a worker that does not see its driver's disk: they come and go with messages.

What is written goes to the driver piece by piece, before anything that is told of it later. Nothing
is kept here that the driver has not got, but for what is on its way: a worker that dies loses no
more than one that writes to a disk. Segments are asked for when they are needed.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections import OrderedDict
from io import BytesIO
from pathlib import PurePath
from threading import Lock
from typing import Any, BinaryIO, cast

from batchinfer.job.fleet.files.outbox import PIECE_BYTES, Outbox
from batchinfer.job.fleet.messages import Appended, Deleted, FileChange, Piece, Wanted
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.staged_files import StagedFiles

COPIED_BYTES = 64 << 20
"""Of segments that are kept to be read again."""


class RelayedFiles(StagedFiles):
    """The files of an output directory on another machine, as a worker writes and reads them.

    Args:
        out: the directory; its paths mean nothing on this machine.
        outbox: brings messages to the driver.
    """

    flush_every_s = 5.0
    parallel_requests = 1

    def __init__(self, out: OutputDir, outbox: Outbox) -> None:
        super().__init__()
        self._out = out
        self._outbox = outbox
        self._copies: OrderedDict[PurePath, bytes] = OrderedDict()
        self._copied_bytes = 0
        self._reading = Lock()

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Send what is staged to where it belongs."""
        data, name = self._staged.pop(source), self._name(target)
        sha256 = hashlib.sha256(data).hexdigest()
        starts = range(0, len(data), PIECE_BYTES) or [0]
        for start in starts:
            piece = data[start : start + PIECE_BYTES]
            self._outbox.send(Piece(name, piece, sha256 if start == starts[-1] else ""))
        if target.parent == self._out.segments:
            with self._reading:
                self._keep(target, data)

    def append_to(self, path: PurePath, *, at_once: bool = False) -> BinaryIO:
        """Open a log, which is on the driver's disk as far as the last report goes."""
        return cast(BinaryIO, _RelayedLog(self._outbox, self._name(path)))

    def open(self, path: PurePath) -> BinaryIO:
        if path in self._staged:
            return BytesIO(self._staged[path])
        with self._reading:
            data = self._copies.pop(path, None)
            if data is None:
                data = self._fetch(path)
            else:
                self._copied_bytes -= len(data)
            self._keep(path, data)
            return BytesIO(data)

    def copy(self, source: PurePath, target: PurePath, staging: PurePath) -> None:
        with self.open(source) as file:
            self.write(staging / target.name, file.read())
        self.rename(staging / target.name, target)

    def delete(self, path: PurePath) -> None:
        self._drop_staged(path)
        self._outbox.send(Deleted(self._name(path)))

    def entries(self, directory: PurePath) -> list[PurePath]:
        """None: a worker is told which files to read."""
        return []

    def stat(self, path: PurePath) -> FileStat | None:
        """None: a worker is told which files to read."""
        return None

    def holds(self, directory: PurePath, path: str) -> bool:
        """False: no path of this machine leads there."""
        return False

    def _fetch(self, path: PurePath) -> bytes:
        found = bytearray()
        while True:
            answer = self._outbox.ask(Wanted(self._name(path), len(found)))
            if answer.data is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            found += answer.data
            if len(found) >= answer.size:
                return bytes(found)

    def _keep(self, path: PurePath, data: bytes) -> None:
        """Keep a copy, and those read last beside it, as long as there is room."""
        self._copies[path] = data
        self._copied_bytes += len(data)
        while self._copied_bytes > COPIED_BYTES:
            _, oldest = self._copies.popitem(last=False)
            self._copied_bytes -= len(oldest)

    def _name(self, path: PurePath) -> str:
        return path.relative_to(self._out.state).as_posix()


class _RelayedLog(io.RawIOBase):
    def __init__(self, outbox: Outbox, name: str) -> None:
        self._outbox = outbox
        self._name = name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        change: FileChange = Appended(self._name, bytes(data))
        self._outbox.send(change, urgent=False)
        return len(data)
