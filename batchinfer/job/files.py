"""Writing files so that a reader, and a run after a crash, sees all of a file or none of it."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchinfer.errors import StorageError
from batchinfer.job.messages import printable

_HASH_CHUNK = 1 << 20


_ADVICE = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there: your quota is used up",
    errno.EFBIG: "allow larger files there (ulimit -f)",
    errno.EROFS: "use --output for a directory that can be written to",
    errno.EACCES: "mend the permissions, or use --output for another directory",
    errno.EPERM: "mend the permissions, or use --output for another directory",
    errno.EEXIST: "a file is where a folder must be: move it away",
    errno.ENOTDIR: "a file is where a folder must be: move it away",
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into StorageError, naming ``path``."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number else str(error)  # pyarrow words errors its own way
        advice = _ADVICE.get(number, "see to it")
        raise StorageError(
            f"cannot write {printable(str(path))}: {reason}",
            hint=f"{advice}, then run again: finished parts are kept",
        ) from error


def publish(staged: Path, final: Path) -> None:
    """Make the finished file ``staged`` appear as ``final``, on disk when this returns.

    Raises:
        StorageError: the file system refuses.
    """
    with storage_errors(final):
        _sync(staged)
        os.replace(staged, final)
        _sync(final.parent)


def write_file(final: Path, data: bytes, staging: Path) -> None:
    """Write ``data`` to ``final`` by way of the directory ``staging``.

    Raises:
        StorageError: the file system refuses.
    """
    staged = staging / final.name
    with storage_errors(final):
        staged.write_bytes(data)
    publish(staged, final)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
