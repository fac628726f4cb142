"""Reads input files from S3 and Google Cloud Storage."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import obstore
import pyarrow as pa

from batchinfer.job.storage.connection import connect, errors
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.object_store import file_stat
from batchinfer.job.storage.urls import StorePath, fixed_part


class ObjectStore:
    """Reads files in object stores; paths are URLs."""

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        place = StorePath(path)
        with errors(path, "read"):
            if place.key and not path.endswith("/") and _is_object(place):
                return "file"
            return "folder" if any(_objects(place)) else None

    def files_below(self, folder: str, suffixes: tuple[str, ...]) -> set[str]:
        place = StorePath(folder)
        with errors(folder, "read"):
            return {
                str(file)
                for file, size in _objects(place)
                if file != place and file.name.endswith(suffixes) and _has_content(file, size)
            }

    def glob(self, pattern: str, suffixes: tuple[str, ...]) -> set[tuple[str, str]] | None:
        wanted = StorePath(pattern)
        with errors(pattern, "read"):
            objects = list(_objects(fixed_part(wanted)))
            matches = ((_match(file, wanted), file, size) for file, size in objects)
            files = {
                (str(match), str(file))
                for match, file, size in matches
                if match == file or (match and file.name.endswith(suffixes))
                if _has_content(file, size)
            }
        return files if objects else None

    def stat(self, path: str) -> FileStat:
        place = StorePath(path)
        with errors(path, "read"):
            return file_stat(obstore.head(connect(place.bucket), place.key))

    def stats_below(self, folder: str) -> Iterator[tuple[str, FileStat]]:
        place = StorePath(folder)
        with errors(folder, "read"):
            for batch in obstore.list(connect(place.bucket), place.key or None):
                for entry in batch:
                    yield str(StorePath(place.bucket, entry["path"])), file_stat(entry)

    def open(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_RemoteFile(path, self.stat(path)), mode="r")


class _RemoteFile(io.RawIOBase):
    """An object as a file; each read requests bytes of the version that was opened."""

    def __init__(self, path: str, found: FileStat) -> None:
        self._path = StorePath(path)
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
        end = min(self._size, self._at + len(buffer))
        if end <= self._at:
            return 0
        with errors(str(self._path), "read"):
            options: Any = {"range": (self._at, end), "if_match": self._etag}
            store = connect(self._path.bucket)
            data = obstore.get(store, self._path.key, options=options).bytes()
        count = len(data)
        buffer[:count] = memoryview(data)
        self._at += count
        return count


def _is_object(place: StorePath) -> bool:
    try:
        obstore.head(connect(place.bucket), place.key)
    except FileNotFoundError:
        return False
    return True


def _objects(folder: StorePath) -> Iterator[tuple[StorePath, int]]:
    """Return the objects below a folder with their sizes in bytes.

    Cloud consoles create an empty object for a folder, with a name that ends in a slash. The result
    contains these objects too, without the slash.
    """
    for batch in obstore.list(connect(folder.bucket), folder.key or None):
        yield from ((StorePath(folder.bucket, entry["path"]), entry["size"]) for entry in batch)


def _has_content(file: StorePath, size: int) -> bool:
    """Return False for an empty object that a cloud console has created for a folder."""
    return size > 0 or _is_object(file)


def _match(file: StorePath, pattern: StorePath) -> StorePath | None:
    """Return the file or the nearest folder above it that a pattern matches; None if none does."""
    return next((p for p in (file, *file.parents) if _matches(p.parts, pattern.parts)), None)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[at:], pattern[1:]) for at in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
