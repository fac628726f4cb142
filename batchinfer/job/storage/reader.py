"""Finds and opens input files on this machine, in object stores and on the Hugging Face Hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
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
    """A local or remote store of input files, which are named by paths or URLs.

    Methods raise OSError if a file is missing or may not be read, and StorageError if the store
    does not answer.
    """

    def kind(self, path: str) -> Literal["file", "folder", "other"] | None:
        """Return the kind of a literal path (not a glob); None if it does not exist."""
        ...

    def files_below(self, folder: str, suffixes: tuple[str, ...]) -> set[str]:
        """Return the files in a folder and its subfolders that end in one of ``suffixes``."""
        ...

    def glob(self, pattern: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]] | None:
        """Expand a glob, which may contain ``**``, into pairs of a match and a file.

        A matched file is paired with itself, a matched folder with each file in ``files_below``.
        Return None if the folder of the pattern does not exist.
        """
        ...

    def stat(self, path: str) -> FileStat: ...

    def open(self, path: str) -> pa.NativeFile: ...


class RemoteStore(Store, Protocol):
    """An object store, or the Hugging Face Hub."""

    def stats_below(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        """Yield the URL and the metadata of each file in a folder and its subfolders."""
        ...


class LocalStore:
    """This machine's file system."""

    def kind(self, path: str) -> Literal["file", "folder", "other"] | None:
        local = Path(path)
        if local.is_file():
            return "file"
        if local.is_dir():
            return "folder"
        return "other" if local.exists() else None

    def files_below(self, folder: str, suffixes: tuple[str, ...]) -> set[str]:
        return {
            os.path.join(directory, name)
            for directory, _, names in os.walk(Path(folder))
            for name in names
            if name.endswith(suffixes)
        }

    def glob(self, pattern: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]]:
        matches: set[tuple[str, str]] = set()
        for match in glob.iglob(pattern, recursive=True):
            files = self.files_below(match, suffixes) if os.path.isdir(match) else {match}
            matches |= {(match, file) for file in files}
        return matches

    def stat(self, path: str) -> FileStat:
        status = Path(path).stat()
        if not S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise OSError("it is not a file")
        return FileStat(status.st_size, status.st_mtime_ns, ctime_ns=status.st_ctime_ns)

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(path)


def store_of(path: str) -> Store:
    """Return the store that holds a path or URL; raise UsageError if its package is missing."""
    return remote_store_of(path) if is_url(path) else LocalStore()


def remote_store_of(url: str) -> RemoteStore:
    """Return the store that holds a URL; raise UsageError if its package is not installed."""
    if scheme_of(url) == "hf":
        from batchinfer.job.storage.hub_reader import HubStore

        return HubStore()
    connect(StorePath(url).bucket)
    # This module is imported only if needed, because it requires obstore.
    from batchinfer.job.storage.object_reader import ObjectStore

    return ObjectStore()


def expand(entry: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files of an entry of ``input.path``, in path order.

    An entry is a glob unless a file or folder has its exact name. In folders, only files whose
    names end in one of ``suffixes`` are returned.

    Raises:
        DataError: no file matches.
        OSError: the entry cannot be read.
        StorageError: the store does not answer.
        UsageError: the package that reads from the store is not installed.
    """
    matches = _matches(entry, suffixes)
    files = {file for at, file in matches if not _is_hidden_below(at, file)}
    if not is_url(entry):
        files = {str(PurePath(file)) for file in files}
    if not files:
        endings = " or ".join(suffix for suffix in suffixes if suffix.count(".") == 1)
        raise DataError(
            f"input.path: {entry} contains no data files; their names must end in {endings}"
        )
    return sorted(files, key=str if is_url(entry) else PurePath)


def _matches(entry: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return pairs of a match (``entry``, or a match of its glob) and a file, hidden or not."""
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
            f"input.path: {entry} is a pipe, a socket or a device, not a file or a folder",
            hint="save the data as a file, because a job reads its input several times",
        )
    raise DataError(
        f"input.path: {entry} does not exist{near_path(entry)}",
        hint="check the path; paths in a job file are relative to the job file's folder",
    )


def _is_hidden(match: PurePath, pattern: PurePath) -> bool:
    """Return True if a wildcard of a glob matched a name that starts with ``.`` or ``_``."""
    return any(
        not any(written[0] == part[0] and fnmatchcase(part, written) for written in pattern.parts)
        for part in match.parts
        if part.startswith(_HIDDEN)
    )


def _is_hidden_below(folder: str, file: str) -> bool:
    parts = PurePosixPath(file).parts[len(PurePosixPath(folder).parts) :]
    return any(part.startswith(_HIDDEN) for part in parts)
