"""Where files are read from: this machine, or an object store. One door to both."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Protocol

import pyarrow as pa

from batchinfer.errors import DataError
from batchinfer.job.files import FileStat
from batchinfer.job.place import is_url, scheme_of

_HIDDEN = (".", "_")


class Store(Protocol):
    """A place that holds files.

    Methods raise OSError where a file is not there or may not be read, and StorageError where the
    place does not answer.
    """

    def expand(self, entry: str, suffixes: tuple[str, ...]) -> list[str]:
        """Files that an entry of ``input.path`` means, in path order; DataError where none.

        In folders, those whose names end in one of ``suffixes``.
        """
        ...

    def stat(self, path: str) -> FileStat:
        """Size, time and mark of a file."""
        ...

    def open(self, path: str) -> pa.NativeFile:
        """A file to be read anywhere."""
        ...


def store_of(path: str) -> Store:
    """The place that a path is in."""
    if scheme_of(path) == "hf":
        from batchinfer.job.hub_store import HubStore

        return HubStore()
    if is_url(path):
        from batchinfer.job.object_store import ObjectStore  # only where it is asked for

        return ObjectStore()
    from batchinfer.job.local_store import LocalStore

    return LocalStore()


def is_hidden(match: PurePath, pattern: PurePath) -> bool:
    """Whether a glob found something that begins with ``.`` or ``_`` by a wildcard."""
    return any(
        not any(written[0] == part[0] and fnmatchcase(part, written) for written in pattern.parts)
        for part in match.parts
        if part.startswith(_HIDDEN)
    )


def is_data(parts: Sequence[str], suffixes: tuple[str, ...]) -> bool:
    """Whether a file of a searched folder is data, by its path below the folder."""
    return parts[-1].endswith(suffixes) and not any(part.startswith(_HIDDEN) for part in parts)


def no_data(entry: str, suffixes: tuple[str, ...]) -> DataError:
    """There are files, or at least a folder, and no data."""
    endings = " or ".join(suffix for suffix in suffixes if suffix.count(".") == 1)
    return DataError(f"input.path: no data in {entry}; in a folder, names must end in {endings}")


def not_there(entry: str) -> DataError:
    """There is nothing of that name."""
    return DataError(
        f"input.path: {entry} does not exist",
        hint="check the path; in a job file it is relative to the file's folder",
    )
