"""Writes files so that readers see each file whole or not at all, even after a crash.

``Files`` lists the operations that an output directory needs from a file system. Tests use an
implementation that loses unsynced data.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Final, Protocol, TypeVar, cast

from batchinfer.console.format import printable
from batchinfer.errors import StorageError
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.job.storage.urls import is_url

T = TypeVar("T")
_HASH_CHUNK = 1 << 20
STRICT: Final = {"extra": "forbid", "strict": True}
"""Pydantic's settings for records stored as JSON, which make pydantic refuse damaged records."""

READ_TRIES = 3
"""Number of attempts to read a file of an output directory."""
_PAUSE_S = 0.05
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors for a file that does not exist; other errors mean that the file cannot be read."""

_ADVICE = {
    errno.EIO: "check the disk",
    errno.ENOMEM: "free memory",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, because your quota is used up",
    errno.EFBIG: "allow larger files there (ulimit -f)",
    errno.EROFS: "use --output for a directory that is writable",
    errno.EACCES: "fix the permissions, or use --output for another directory",
    errno.EPERM: "fix the permissions, or use --output for another directory",
    errno.EISDIR: "move away the folder with this name",
    errno.EEXIST: "move away the file with this name",
    errno.ENOTDIR: "a file has the name of a folder in this path; move that file away",
    errno.ENOENT: "use --output for a folder that exists or can be created",
}


@dataclass(frozen=True, slots=True)
class FileStat:
    """Metadata of a file, available without reading its content."""

    size: int
    mtime_ns: int
    etag: str | None = None
    """An object store's entity tag, which changes with the content; None in a file system."""
    ctime_ns: int = 0
    """Time of the last change of the file or its metadata, which users cannot set; 0 if unknown."""


class Files(Protocol):
    """The file system of an output directory.

    Methods that write raise OSError if the file system refuses. Methods that read, and the files
    they return, raise FileNotFoundError, NotADirectoryError or IsADirectoryError if the file does
    not exist, and StorageError if the file cannot be read.
    """

    @property
    def flush_every_s(self) -> float:
        """Seconds between two writes of finished rows to a file."""
        ...

    @property
    def parallel_requests(self) -> int:
        """Best number of concurrent requests."""
        ...

    def write(self, path: PurePath, data: bytes) -> None:
        """Create or replace a file; the file is on disk only after ``sync``."""
        ...

    def create(self, path: PurePath) -> BinaryIO:
        """Create or empty a file, and open it for writing."""
        ...

    def append_to(self, path: PurePath) -> BinaryIO:
        """Open a new or existing file to append to it.

        Each write survives the death of this process; in an object store, only after ``flush``.
        """
        ...

    def open(self, path: PurePath) -> BinaryIO: ...

    def sync(self, path: PurePath) -> None:
        """Write a file's content, or a directory's entries, to disk."""
        ...

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Rename a file, replacing any file at ``target``; durable when both folders are synced."""
        ...

    def copy(self, source: PurePath, target: PurePath, staging: PurePath) -> None:
        """Copy a file atomically, and replace any file at ``target``.

        The copy is durable after the folder's ``sync`` if the source is durable. Source and copy
        may share one inode, because batchinfer never writes to a finished file.

        Args:
            staging: a folder for the temporary file.
        """
        ...

    def delete(self, path: PurePath) -> None:
        """Delete a file, or a folder and its content; a missing file is not an error."""
        ...

    def make_directory(self, path: PurePath) -> None:
        """Create a folder and its missing parents, and sync them."""
        ...

    def can_write(self, directory: PurePath) -> bool: ...

    def entries(self, directory: PurePath) -> Sequence[PurePath]:
        """Return the contents of a folder, sorted by name; empty if the folder is missing."""
        ...

    def stat(self, path: PurePath) -> FileStat | None:
        """Return the metadata of a file or folder; None if it is missing."""
        ...

    def holds(self, directory: PurePath, path: str) -> bool:
        """Return True if a job's ``path`` is inside ``directory`` once links are resolved."""
        ...


class LocalFiles:
    """This machine's file system."""

    flush_every_s = 5.0
    parallel_requests = 1

    def write(self, path: PurePath, data: bytes) -> None:
        Path(path).write_bytes(data)

    def create(self, path: PurePath) -> BinaryIO:
        return Path(path).open("wb")

    def append_to(self, path: PurePath) -> BinaryIO:
        return cast(BinaryIO, Path(path).open("ab", buffering=0))

    def open(self, path: PurePath) -> BinaryIO:
        file = _retry(path, lambda: io.FileIO(path))
        return cast(BinaryIO, io.BufferedReader(_RetryingReader(path, file)))

    def sync(self, path: PurePath) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: PurePath, target: PurePath) -> None:
        os.replace(source, target)

    def copy(self, source: PurePath, target: PurePath, staging: PurePath) -> None:
        staged = Path(staging) / target.name
        staged.unlink(missing_ok=True)
        try:
            os.link(source, staged)
        except FileNotFoundError:
            raise
        except OSError:  # the file system does not support hard links
            shutil.copy2(source, staged)
            self.sync(staged)
        os.replace(staged, target)  # does nothing if both names are links to one file
        staged.unlink(missing_ok=True)

    def delete(self, path: PurePath) -> None:
        doomed = Path(path)
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink(missing_ok=True)

    def make_directory(self, path: PurePath) -> None:
        wanted = Path(path)
        missing = [folder for folder in (wanted, *wanted.parents) if not folder.exists()]
        wanted.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.sync(folder.parent)

    def can_write(self, directory: PurePath) -> bool:
        return os.access(directory, os.W_OK | os.X_OK)

    def entries(self, directory: PurePath) -> list[Path]:
        try:
            return sorted(_retry(directory, lambda: list(Path(directory).iterdir())))
        except NOT_THERE:
            return []

    def stat(self, path: PurePath) -> FileStat | None:
        try:
            status = _retry(path, Path(path).stat)
        except NOT_THERE:
            return None
        return FileStat(status.st_size, status.st_mtime_ns)

    def holds(self, directory: PurePath, path: str) -> bool:
        if is_url(path):
            return False
        real = Path(os.path.realpath(path))
        return real.is_relative_to(os.path.realpath(directory))


class _RetryingReader(io.RawIOBase):
    """A file that retries failed reads at the same position."""

    def __init__(self, path: PurePath, file: io.FileIO) -> None:
        self._path = path
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return _retry(self._path, lambda: self._file.readinto(buffer))

    def readall(self) -> bytes:
        start = self._file.tell()
        return _retry(self._path, lambda: self._read_from(start))

    def _read_from(self, start: int) -> bytes:
        self._file.seek(start)
        return self._file.readall()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()


def _retry(path: PurePath, read: Callable[[], T], tries: int = READ_TRIES) -> T:
    """Call ``read``; call it again after transient errors.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: the file does not exist.
        StorageError: every attempt fails.
    """
    try:
        return read()
    except NOT_THERE:
        raise
    except OSError:
        if tries > 1:
            time.sleep(_PAUSE_S)
            return _retry(path, read, tries - 1)
        with storage_errors(path, "read"):
            raise


@contextmanager
def storage_errors(path: PurePath, verb: str = "write") -> Iterator[None]:
    """Turn the operating system's errors into a StorageError that names ``path``; ``verb`` is
    ``read``, ``write`` or ``delete``."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        # pyarrow words these errors differently, so use the system's text if there is an errno.
        reason = os.strerror(number) if number else str(error)
        advice = _ADVICE.get(number, "fix the problem, or use --output for another directory")
        raise StorageError(
            f"cannot {verb} {printable(str(path))}: {reason}",
            hint=f"{advice}, then run again; finished rows are kept",
        ) from error


def publish(files: Files, staged: PurePath, final: PurePath) -> None:
    """Move the finished file ``staged`` to ``final``. On return, the file is on disk.

    The failpoints have the name of the folder of ``final``, followed by ``-staged``, ``-synced``,
    ``-renamed`` or ``-durable``.
    """
    kind = final.parent.name
    with storage_errors(final):
        failpoint(f"{kind}-staged")
        files.sync(staged)
        failpoint(f"{kind}-synced")
        files.rename(staged, final)
        failpoint(f"{kind}-renamed")
        files.sync(final.parent)
        failpoint(f"{kind}-durable")


def write_file(files: Files, final: PurePath, data: bytes, staging: PurePath) -> None:
    """Write ``data`` to ``final``, through a temporary file in the directory ``staging``."""
    staged = staging / final.name
    with storage_errors(final):
        files.write(staged, data)
    publish(files, staged, final)


def read_file(files: Files, path: PurePath) -> bytes:
    """Return all bytes of a file.

    Raises:
        OSError: the file does not exist.
        StorageError: the file cannot be read.
    """
    with files.open(path) as file:
        return file.read()


def parse_json(data: bytes) -> Any:
    """Parse JSON. Raise ValueError if ``data`` is not valid JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256_of(files: Files, path: PurePath) -> str:
    """Return the SHA-256 of a file, in hex.

    Raises:
        OSError: the file does not exist.
        StorageError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with files.open(path) as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
