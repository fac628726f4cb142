"""Object stores (S3, Google Cloud Storage), to read from, by way of obstore.

Credentials, region and endpoint come from the environment (``AWS_*``, ``GOOGLE_*``) or the
machine's role, never from a job. What a store does not answer is asked for again, with growing
pauses, by obstore.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.errors import StorageError, UsageError
from batchinfer.job.files import FileStat
from batchinfer.job.messages import printable
from batchinfer.job.store import is_data, is_hidden, no_parquet, not_there

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Connection

RETRY: Mapping[str, Any] = {"max_retries": 8, "retry_timeout": timedelta(minutes=2)}
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_NOT_GIVEN = (
    *("PermissionDeniedError", "UnauthenticatedError", "InvalidPathError"),
    "PreconditionError",  # it was written again
)
_REFUSED = re.compile(r"status code: 4\d\d")
"""What obstore raises, and says, of a store that answers and does not give the object."""


class ObjectStore:
    """See ``batchinfer.job.store.Store``; paths are URLs."""

    def expand(self, entry: str) -> list[str]:
        """See ``Store``."""
        bucket, key = _split(entry)
        with _errors(entry):
            if key and not key.endswith("/") and _is_object(bucket, key):
                return [entry]
            found = _matching(bucket, key) if glob.has_magic(key) else _data(bucket, key)
            # Consoles put empty objects for folders, named with a slash that is not listed.
            keys = [name for name, size in found if size or _is_object(bucket, name)]
            if not keys and not any(_keys(bucket, _fixed_part(key))):
                raise not_there(entry)
        if not keys:
            raise no_parquet(entry)
        return [f"{bucket}/{key}" for key in sorted(keys)]

    def stat(self, path: str) -> FileStat:
        """See ``Store``."""
        import obstore

        bucket, key = _split(path)
        with _errors(path):
            found = obstore.head(_connect(bucket), key)
        mtime_ns = round(found["last_modified"].timestamp() * 1e9)
        return FileStat(found["size"], mtime_ns, found["e_tag"])

    def open(self, path: str) -> pa.NativeFile:
        """See ``Store``."""
        return pa.PythonFile(_RemoteFile(path, self.stat(path)), mode="r")


class _RemoteFile(io.RawIOBase):
    """An object as a file, each read a request for the content that it had when it was opened."""

    def __init__(self, path: str, found: FileStat) -> None:
        self._path = path
        self._bucket, self._key = _split(path)
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
        with _errors(self._path):
            options: Any = {"range": (self._at, end), "if_match": self._etag}
            data = obstore.get(_connect(self._bucket), self._key, options=options).bytes()
        count = len(data)
        buffer[:count] = memoryview(data)
        self._at += count
        return count


def _split(url: str) -> tuple[str, str]:
    """Scheme and bucket, and the key in it."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


@cache
def _connect(bucket: str) -> Connection:
    try:
        from obstore.store import from_url
    except ImportError:
        raise UsageError(
            f"input.path: reading {printable(bucket)} needs the package obstore",
            hint="pip install obstore",
        ) from None
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    options: Any = {"client_options": {"allow_http": plain}, "retry_config": RETRY}
    with _errors(bucket):
        return from_url(bucket, **options)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Name ``url`` in what obstore raises, and leave out what it says beyond a line."""
    try:
        yield
    except FileNotFoundError:
        raise OSError("there is no such object") from None
    except Exception as error:
        kind = type(error)
        if not kind.__module__.startswith("obstore"):
            raise
        reason = printable((str(error).splitlines() or [kind.__name__])[0])
        if kind.__name__ in _NOT_GIVEN or _REFUSED.search(reason):
            raise OSError(reason) from None
        raise StorageError(
            f"cannot read {printable(url)}: {reason}",
            hint="see to the store, then run again: finished rows are kept",
        ) from None


def _is_object(bucket: str, key: str) -> bool:
    import obstore

    try:
        obstore.head(_connect(bucket), key)
    except FileNotFoundError:
        return False
    return True


def _keys(bucket: str, folder: str) -> Iterator[tuple[str, int]]:
    """Keys below a folder, and bytes of each; the folder's own, where an object stands for it."""
    import obstore

    for batch in obstore.list(_connect(bucket), folder or None):
        yield from ((entry["path"], entry["size"]) for entry in batch)


def _data(bucket: str, key: str) -> Iterator[tuple[str, int]]:
    folder = PurePosixPath(key)
    for found, size in _keys(bucket, key):
        below = PurePosixPath(found).relative_to(folder).parts
        if below and is_data(below):
            yield found, size


def _matching(bucket: str, pattern: str) -> Iterator[tuple[str, int]]:
    wanted = PurePosixPath(pattern)
    for key, size in _keys(bucket, _fixed_part(pattern)):
        found = PurePosixPath(key)
        if is_hidden(found, wanted):
            continue
        if _matches(found.parts, wanted.parts) or (
            key.endswith(".parquet")
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
