"""Where files are read from: this machine, or an object store. One door to both."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.urls import is_url, scheme_of


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
        from batchinfer.job.storage.hub_reader import HubStore

        return HubStore()
    if is_url(path):
        from batchinfer.job.storage.object_reader import ObjectStore  # only where it is asked for

        return ObjectStore()
    from batchinfer.job.storage.local_reader import LocalStore

    return LocalStore()
