"""Reads and writes whole objects of a bucket, with conditional writes.

Every write names the version that it replaces, or requires that no object exists. The store refuses
the write if the object has another version (``If-Match``, ``If-None-Match``). Deletes and copies
cannot be conditional, so they fail soon if the store does not answer: a late delete or copy could
affect objects of another run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from batchinfer.console.format import printable
from batchinfer.errors import StorageError
from batchinfer.job.storage.connection import connect, errors
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.urls import StorePath

Version = dict[str, str]
"""Etag and generation of an object, which change with its content."""


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    stat: FileStat
    version: Version


class Objects:
    """The objects in the bucket that contains ``root``.

    Methods raise FileNotFoundError if an object does not exist, and StorageError if the store
    refuses or does not answer.
    """

    def __init__(self, root: StorePath) -> None:
        self._store = connect(root.bucket)
        self._impatient = connect(root.bucket, impatient=True)

    def put(self, path: StorePath, data: bytes, instead_of: Version | None) -> Version | None:
        """Write an object atomically.

        Args:
            instead_of: the version to replace; None if the object must not exist.

        Returns:
            The new version; None if the object did not have the version ``instead_of``.
        """
        mode: Any = instead_of or "create"
        with _answers(path, "write"):
            try:
                result = obstore.put(self._store, path.key, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return None
        return _version(result)

    def get(self, path: StorePath) -> tuple[bytes, ObjectMeta]:
        with _answers(path, "read"):
            result = obstore.get(self._store, path.key)
            return bytes(result.bytes()), _object_meta(result.meta)

    def head(self, path: StorePath) -> ObjectMeta | None:
        """Return an object's metadata; None if it does not exist."""
        with _answers(path, "read"):
            try:
                return _object_meta(obstore.head(self._store, path.key))
            except FileNotFoundError:
                return None

    def entries(self, folder: StorePath) -> list[StorePath]:
        try:
            with _answers(folder, "read"):
                listed = obstore.list_with_delimiter(self._store, folder.key)
        except FileNotFoundError:  # the bucket is missing (a missing folder has an empty listing)
            raise _refusal(folder, "read", "there is no such bucket") from None
        keys = [*listed["common_prefixes"], *(entry["path"] for entry in listed["objects"])]
        names = {key.rstrip("/").rpartition("/")[2] for key in keys if key != folder.key}
        return [folder / name for name in sorted(names)]

    def keys(self, path: StorePath) -> list[str]:
        """Return the keys of an object and of all objects in a folder of the same name."""
        with _answers(path, "read"):
            lists = list(obstore.list(self._store, path.key))
        below = [entry["path"] for entries in lists for entry in entries]
        return below if self.head(path) is None else [*below, path.key]

    def copy(self, source: StorePath, target: StorePath) -> None:
        """Copy an object to another key of the bucket, and replace any object with that key."""
        with _answers(source, "read"):
            obstore.copy(self._impatient, source.key, target.key)

    def delete(self, path: StorePath, keys: Sequence[str]) -> bool:
        """Delete objects.

        Args:
            path: the object or folder that error messages name.
            keys: keys to delete.

        Returns:
            False if an object was missing; other objects may then still exist.
        """
        with _answers(path, "write"), suppress(FileNotFoundError):
            obstore.delete(self._impatient, keys)
            return True
        return False


def _version(meta: Any) -> Version:
    named = {"e_tag": meta["e_tag"], "version": meta["version"]}
    return {name: value for name, value in named.items() if value is not None}


def _object_meta(meta: Any) -> ObjectMeta:
    return ObjectMeta(file_stat(meta), _version(meta))


def file_stat(meta: Any) -> FileStat:
    return FileStat(meta["size"], round(meta["last_modified"].timestamp() * 1e9), meta["e_tag"])


@contextmanager
def _answers(path: StorePath, verb: str) -> Iterator[None]:
    try:
        with errors(str(path), verb):
            yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and verb == "read":
            raise
        reason = "there is no such bucket" if isinstance(error, FileNotFoundError) else error
        raise _refusal(path, verb, reason) from None


def _refusal(path: StorePath, verb: str, reason: object) -> StorageError:
    return StorageError(
        f"cannot {verb} {printable(str(path))}: {reason}",
        hint="fix the permissions, or use --output to write elsewhere; finished rows are kept",
    )
