"""Files of an output directory, each seen whole or not at all, by readers and after a crash.

``Files`` is all the commit protocol asks of a file system; tests put one in its place that loses
what was not synced.
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
"""Pydantic's settings of records that are stored as JSON: what is damaged must not pass."""

READ_TRIES = 3
"""Times that a file of our own is read before that counts as failed."""
_PAUSE_S = 0.05
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What says that there is no such file, not that it could not be read."""

_ADVICE = {
    errno.EIO: "check the disk",
    errno.ENOMEM: "free memory",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there: your quota is used up",
    errno.EFBIG: "allow larger files there (ulimit -f)",
    errno.EROFS: "use --output for a directory that can be written to",
    errno.EACCES: "mend the permissions, or use --output for another directory",
    errno.EPERM: "mend the permissions, or use --output for another directory",
    errno.EISDIR: "a folder is where a file must be: move it away",
    errno.EEXIST: "a file is where a folder must be: move it away",
    errno.ENOTDIR: "a file is where a folder must be: move it away",
}


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size, time and mark of a file, which need no reading of it."""

    size: int
    mtime_ns: int
    etag: str | None = None
    """An object store's mark of the content; None in a file system."""
    ctime_ns: int = 0
    """When a file system last changed the file or what it knows of it, which no one can set; 0:
    not known."""


class Files(Protocol):
    """The file system of an output directory.

    Methods that write raise OSError where it refuses. Those that read raise FileNotFoundError,
    NotADirectoryError or IsADirectoryError for a file that is not there, as what they give does,
    and StorageError where one cannot be read: that says nothing of what is in it.
    """

    @property
    def flush_every_s(self) -> float:
        """Seconds after which finished rows are worth a file."""
        ...

    @property
    def parallel_requests(self) -> int:
        """Requests at a time that are faster than one after the other."""
        ...

    def write(self, path: PurePath, data: bytes) -> None:
        """Make a file, or replace its content; on disk only after ``sync``."""
        ...

    def create(self, path: PurePath) -> BinaryIO:
        """Make a file, or empty it, and open it to write it."""
        ...

    def append_to(self, path: PurePath) -> BinaryIO:
        """Open a file, new or not, to add to its end.

        Each write outlives this process, in a store only after ``flush``.
        """
        ...

    def open(self, path: PurePath) -> BinaryIO:
        """Open a file to read it."""
        ...

    def sync(self, path: PurePath) -> None:
        """Put a file's content, or a directory's entries, on disk."""
        ...

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Give a file another name, whatever had that name; on disk after the folders' sync."""
        ...

    def copy(self, source: PurePath, target: PurePath, staging: PurePath) -> None:
        """Give a file's content, all at once, to another name as well, whatever had that name.

        On disk after the folder's sync, if the source is. Both may be one file from then on: no
        file of ours is ever written to again.

        Args:
            staging: a folder for what is on its way.
        """
        ...

    def delete(self, path: PurePath) -> None:
        """Delete a file or a folder with all in it; one that is missing is no error."""
        ...

    def make_directory(self, path: PurePath) -> None:
        """Make a folder, and the folders it is in, where they are missing; on disk at once."""
        ...

    def can_write(self, directory: PurePath) -> bool:
        """Whether files may be made in a folder."""
        ...

    def entries(self, directory: PurePath) -> Sequence[PurePath]:
        """Files and folders in a folder, in the order of names; none where it is missing."""
        ...

    def stat(self, path: PurePath) -> FileStat | None:
        """Size and time of a file or folder; None where it is missing."""
        ...

    def holds(self, directory: PurePath, path: str) -> bool:
        """Whether a file that a job names is in a folder, wherever links lead."""
        ...


class LocalFiles:
    """The files of this machine."""

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
        except OSError:  # a file system without links
            shutil.copy2(source, staged)
            self.sync(staged)
        os.replace(staged, target)  # which leaves both names, if they are of one file already
        staged.unlink(missing_ok=True)

    def delete(self, path: PurePath) -> None:
        found = Path(path)
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink(missing_ok=True)

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
            found = _retry(path, Path(path).stat)
        except NOT_THERE:
            return None
        return FileStat(found.st_size, found.st_mtime_ns)

    def holds(self, directory: PurePath, path: str) -> bool:
        if is_url(path):
            return False
        real = Path(os.path.realpath(path))
        return real.is_relative_to(os.path.realpath(directory))


class _RetryingReader(io.RawIOBase):
    """A file whose reads are tried again where they fail."""

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
    """What ``read`` gives, which is called again where it fails for no fault of the file.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: there is no such file.
        StorageError: it fails each time.
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
    """Turn the operating system's errors into StorageError, naming ``path``.

    Args:
        verb: what was done to it: ``write`` or ``delete``.
    """
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number else str(error)  # pyarrow words errors its own way
        advice = _ADVICE.get(number, "mend that")
        raise StorageError(
            f"cannot {verb} {printable(str(path))}: {reason}",
            hint=f"{advice}, then run again: finished rows are kept",
        ) from error


def publish(files: Files, staged: PurePath, final: PurePath) -> None:
    """Make the finished file ``staged`` appear as ``final``, on disk when this returns.

    Failpoints: ``<folder of final>-`` and ``staged``, ``synced``, ``renamed`` or ``durable``.

    Raises:
        StorageError: the file system refuses.
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
    """Write ``data`` to ``final`` by way of the directory ``staging``.

    Raises:
        StorageError: the file system refuses.
    """
    staged = staging / final.name
    with storage_errors(final):
        files.write(staged, data)
    publish(files, staged, final)


def read_file(files: Files, path: PurePath) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: there is no such file.
        StorageError: it cannot be read.
    """
    with files.open(path) as file:
        return file.read()


def parse_json(data: bytes) -> Any:
    """The value that stored JSON holds, which may be torn or whatever else has got there.

    Raises:
        ValueError: it is no JSON, or none that can be read.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256_of(files: Files, path: PurePath) -> str:
    """Hex digest of a file's bytes.

    Raises:
        OSError: there is no such file.
        StorageError: it cannot be read.
    """
    digest = hashlib.sha256()
    with files.open(path) as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
