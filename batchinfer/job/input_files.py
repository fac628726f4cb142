"""Which files ``input.path`` means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from batchinfer.errors import DataError, UsageError
from batchinfer.job.messages import printable
from batchinfer.job.store import store_of


def find_files(path: str | Sequence[str]) -> list[str]:
    """Files meant by ``path``: entries in the order given, globs and directories in path order.

    In directories, which are searched with their subdirectories, and in globs, files and folders
    whose names begin with ``.`` or ``_`` are passed over, unless the glob itself writes that out.

    Raises:
        DataError: an entry that matches no file, or cannot be looked at.
        StorageError: an object store does not answer.
        UsageError: a file named twice.
    """
    entries = [path] if isinstance(path, str) else list(path)
    found = [file for entry in entries for file in _find(entry)]
    for file, times in Counter(found).items():
        if times > 1:
            raise UsageError(f"input.path names {file} {times} times; keep one")
    return found


def _find(entry: str) -> list[str]:
    try:
        return store_of(entry).expand(entry)
    except OSError as error:  # from names no file can have, and folders that may not be read
        reason = error.strerror or error
        raise DataError(f"input.path: {printable(entry, 200)}: {reason}") from None
