"""Places to read files from: this machine, an object store, the Hugging Face Hub."""

from __future__ import annotations

import glob
import os
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from stat import S_ISREG
from typing import Literal, Protocol

import pyarrow as pa

from batchinfer.console.format import near_path
from batchinfer.errors import DataError
from batchinfer.job.storage.connection import connect
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.urls import StorePath, is_url, scheme_of

_HIDDEN = (".", "_")


class Store(Protocol):
    """A place that holds files, by paths or URLs.

    Methods raise OSError where a file is not there or may not be read, and StorageError where the
    place does not answer.
    """

    def kind(self, path: str) -> Literal["file", "folder", "other"] | None:
        """What a path names, taken as it is written; None: nothing."""
        ...

    def files_below(self, folder: str, suffixes: tuple[str, ...]) -> set[str]:
        """Files in a folder, and in the folders in it, whose names end in one of ``suffixes``."""
        ...

    def glob(self, pattern: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]] | None:
        """Matches of a pattern, ``**`` among its parts, each with a file.

        Returns:
            Files, each with itself, and folders, each with a file of ``files_below``. None: there
            is not even the folder in which they would be.
        """
        ...

    def stat(self, path: str) -> FileStat:
        """Size, time and mark of a file."""
        ...

    def open(self, path: str) -> pa.NativeFile:
        """A file to be read anywhere."""
        ...


class LocalStore:
    """This machine's file system."""

    def kind(self, path: str) -> Literal["file", "folder", "other"] | None:
        found = Path(path)
        if found.is_file():
            return "file"
        if found.is_dir():
            return "folder"
        return "other" if found.exists() else None

    def files_below(self, folder: str, suffixes: tuple[str, ...]) -> set[str]:
        return {
            os.path.join(directory, name)
            for directory, _, names in os.walk(Path(folder))
            for name in names
            if name.endswith(suffixes)
        }

    def glob(self, pattern: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for match in glob.iglob(pattern, recursive=True):
            files = self.files_below(match, suffixes) if os.path.isdir(match) else {match}
            found |= {(match, file) for file in files}
        return found

    def stat(self, path: str) -> FileStat:
        found = Path(path).stat()
        if not S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
            raise OSError("it is not a file")
        return FileStat(found.st_size, found.st_mtime_ns, ctime_ns=found.st_ctime_ns)

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(path)


def store_of(path: str) -> Store:
    """The place that a path is in.

    Raises:
        UsageError: what reads it is not installed.
    """
    if scheme_of(path) == "hf":
        from batchinfer.job.storage.hub_reader import HubStore

        return HubStore()
    if is_url(path):
        connect(StorePath(path).bucket)
        from batchinfer.job.storage.object_reader import ObjectStore  # needs obstore

        return ObjectStore()
    return LocalStore()


def expand(entry: str, suffixes: tuple[str, ...]) -> list[str]:
    """Files that an entry of ``input.path`` means, in path order.

    What exists is taken as it is written, else an entry is a glob. In folders, also those that a
    glob finds, names must end in one of ``suffixes``.

    Raises:
        DataError: there are none.
        OSError: the entry cannot be looked at.
        StorageError: the place does not answer.
        UsageError: what reads it is not installed.
    """
    found = _found(entry, suffixes)
    files = {_path(file) for at, file in found if not _is_hidden_below(at, file)}
    if not files:
        endings = " or ".join(suffix for suffix in suffixes if suffix.count(".") == 1)
        raise DataError(f"input.path: no data in {entry}; in a folder, names must end in {endings}")
    return sorted(files, key=str if is_url(entry) else PurePath)


def _found(entry: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]]:
    """Files, each with itself or the folder in which it was looked for; hidden ones among them."""
    store = store_of(entry)
    kind = store.kind(entry)
    if kind == "file":
        return {(entry, entry)}
    if kind == "folder":
        return {(entry, file) for file in store.files_below(entry, suffixes)}
    matches = store.glob(entry, suffixes) if glob.has_magic(entry) else None
    if matches is not None:
        pattern = PurePosixPath(entry)
        return {(at, file) for at, file in matches if not _is_hidden(PurePosixPath(at), pattern)}
    if kind == "other":
        raise DataError(
            f"input.path: {entry} is neither a file nor a folder, but a pipe, a socket or a device",
            hint="input is read more than once, and again by a run that goes on: save it as a file",
        )
    raise DataError(
        f"input.path: {entry} does not exist{near_path(entry)}",
        hint="check the path; in a job file it is relative to the file's folder",
    )


def _path(file: str) -> str:
    return file if is_url(file) else str(PurePath(file))


def _is_hidden(match: PurePath, pattern: PurePath) -> bool:
    """Whether a glob found something that begins with ``.`` or ``_`` by a wildcard."""
    return any(
        not any(written[0] == part[0] and fnmatchcase(part, written) for written in pattern.parts)
        for part in match.parts
        if part.startswith(_HIDDEN)
    )


def _is_hidden_below(folder: str, file: str) -> bool:
    parts = PurePosixPath(file).parts[len(PurePosixPath(folder).parts) :]
    return any(part.startswith(_HIDDEN) for part in parts)
