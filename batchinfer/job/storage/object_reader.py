"""Object stores, to read from."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from batchinfer.job.storage.connection import connect, errors, split
from batchinfer.job.storage.expand import is_data, is_hidden, no_data, not_there
from batchinfer.job.storage.filesystem import FileStat


class ObjectStore:
    """See ``batchinfer.job.storage.reader.Store``; paths are URLs."""

    def expand(self, entry: str, suffixes: tuple[str, ...]) -> list[str]:
        """See ``Store``."""
        bucket, key = split(entry)
        with errors(entry, "read"):
            if key and not key.endswith("/") and _is_object(bucket, key):
                return [entry]
            look = _matching if glob.has_magic(key) else _data
            found = look(bucket, key, suffixes)
            # Consoles put empty objects for folders, named with a slash that is not listed.
            keys = [name for name, size in found if size or _is_object(bucket, name)]
            if not keys and not any(_keys(bucket, _fixed_part(key))):
                raise not_there(entry)
        if not keys:
            raise no_data(entry, suffixes)
        return [f"{bucket}/{key}" for key in sorted(keys)]

    def stat(self, path: str) -> FileStat:
        """See ``Store``."""
        import obstore

        bucket, key = split(path)
        with errors(path, "read"):
            found = obstore.head(connect(bucket), key)
        mtime_ns = round(found["last_modified"].timestamp() * 1e9)
        return FileStat(found["size"], mtime_ns, found["e_tag"])

    def open(self, path: str) -> pa.NativeFile:
        """See ``Store``."""
        return pa.PythonFile(_RemoteFile(path, self.stat(path)), mode="r")


class _RemoteFile(io.RawIOBase):
    """An object as a file, each read a request for the content that it had when it was opened."""

    def __init__(self, path: str, found: FileStat) -> None:
        self._path = path
        self._bucket, self._key = split(path)
        self._size = found.size
        self._etag = found.etag
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        import obstore

        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        with errors(self._path, "read"):
            options: Any = {"range": (self._at, end), "if_match": self._etag}
            data = obstore.get(connect(self._bucket), self._key, options=options).bytes()
        count = len(data)
        buffer[:count] = memoryview(data)
        self._at += count
        return count


def _is_object(bucket: str, key: str) -> bool:
    import obstore

    try:
        obstore.head(connect(bucket), key)
    except FileNotFoundError:
        return False
    return True


def _keys(bucket: str, folder: str) -> Iterator[tuple[str, int]]:
    """Keys below a folder, and bytes of each; the folder's own, where an object stands for it."""
    import obstore

    for batch in obstore.list(connect(bucket), folder or None):
        yield from ((entry["path"], entry["size"]) for entry in batch)


def _data(bucket: str, key: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    folder = PurePosixPath(key)
    for found, size in _keys(bucket, key):
        below = PurePosixPath(found).relative_to(folder).parts
        if below and is_data(below, suffixes):
            yield found, size


def _matching(bucket: str, pattern: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    wanted = PurePosixPath(pattern)
    for key, size in _keys(bucket, _fixed_part(pattern)):
        found = PurePosixPath(key)
        if is_hidden(found, wanted):
            continue
        if _matches(found.parts, wanted.parts) or (
            key.endswith(suffixes)
            and any(_matches(folder.parts, wanted.parts) for folder in found.parents)
        ):
            yield key, size


def _fixed_part(pattern: str) -> str:
    """The folders before a pattern's first wildcard."""
    parts = pattern.split("/")
    first = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return "/".join(parts[:first])


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[at:], pattern[1:]) for at in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
