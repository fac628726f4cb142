"""The driver's side of ``relay``: files of workers that do not see its disk."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import PurePath, PurePosixPath
from typing import BinaryIO

from batchinfer.job.fleet.files.outbox import PIECE_BYTES
from batchinfer.job.fleet.messages import Answer, Appended, Deleted, FileChange, Piece, Wanted
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import NOT_THERE, publish, storage_errors

_FOLDERS = ("segments", "tokens", "staging", "steps", "runs", "logs", "in_flight")
"""Where workers write."""


class Inboxes:
    """Files that come from workers, each put together aside and then in its place.

    A file whose worker dies before its last piece is left aside.
    """

    def __init__(self, out: OutputDir) -> None:
        self._out = out
        self._of_runs: dict[str, _Inbox] = {}

    def take(self, run_id: str, changes: Iterable[FileChange]) -> None:
        """Make the changes that a worker's report has, on disk when this returns.

        Raises:
            ValueError: what has come is not what was sent.
            StorageError: a file cannot be written.
        """
        for change in changes:
            if run_id not in self._of_runs:
                self._of_runs[run_id] = _Inbox(self._out, run_id)
            self._of_runs[run_id].take(change)

    def close(self, run_id: str) -> None:
        """Nothing more comes from a worker."""
        inbox = self._of_runs.pop(run_id, None)
        if inbox is not None:
            inbox.close()


def read_wanted(out: OutputDir, wanted: Wanted) -> Answer:
    """The bytes of a file that a worker asks for.

    Raises:
        ValueError: it is none of what workers read.
        StorageError: it cannot be read.
    """
    path = _path(out, wanted.path)
    try:
        with out.files.open(path) as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(wanted.offset)
            return Answer(file.read(PIECE_BYTES), size)
    except NOT_THERE:
        return Answer(None)


class _Inbox:
    """One worker's files, one after the other."""

    def __init__(self, out: OutputDir, run_id: str) -> None:
        self._out = out
        self._incoming = out.staging / run_id / "incoming"
        with storage_errors(self._incoming):
            out.files.make_directory(self._incoming.parent)
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def take(self, change: FileChange) -> None:
        path = _path(self._out, change.path)
        match change:
            case Piece():
                self._add(path, change)
            case Appended():
                with storage_errors(path), self._out.files.append_to(path) as file:
                    file.write(change.data)
            case Deleted():
                with storage_errors(path, "delete"):
                    self._out.files.delete(path)

    def _add(self, path: PurePath, piece: Piece) -> None:
        with storage_errors(path):
            if self._file is None:
                self._file = self._out.files.create(self._incoming)
            self._file.write(piece.data)
        self._digest.update(piece.data)
        if piece.sha256:
            self.close()
            found, self._digest = self._digest.hexdigest(), hashlib.sha256()
            if found != piece.sha256:
                raise ValueError(f"{piece.path} has come with other bytes than it was sent with")
            publish(self._out.files, self._incoming, path)

    def close(self) -> None:
        """Close the file that is being put together."""
        if self._file is not None:
            with storage_errors(self._incoming):
                self._file.close()
            self._file = None


def _path(out: OutputDir, name: str) -> PurePath:
    parts = PurePosixPath(name).parts
    if parts[:1] not in [(folder,) for folder in _FOLDERS] or ".." in parts:
        raise ValueError(f"{name!r} is no file of a worker")
    return out.state.joinpath(*parts)
