"""The files that ``input.path`` means, and their format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from batchinfer.console.format import printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.storage.reader import expand

_PARQUET = (".parquet",)
_LINES = tuple(
    name + packed for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst", ".bz2")
)
_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "auto": (*_PARQUET, *_LINES),
    "parquet": _PARQUET,
    "jsonl": _LINES,
    "openai-batch": _LINES,
}
"""Endings of names that are data in folders, by ``input.format``."""


def find_files(path: str | Sequence[str], format_name: str = "auto") -> list[str]:
    """Files meant by ``path``: entries in the order given, globs and directories in path order.

    In directories, which are searched with their subdirectories, and in globs, files and folders
    whose names begin with ``.`` or ``_`` are passed over, unless the glob itself writes that out.

    Raises:
        DataError: an entry that matches no file, or cannot be looked at.
        StorageError: an object store does not answer.
        UsageError: a file named twice.
    """
    entries = [path] if isinstance(path, str) else list(path)
    found = [file for entry in entries for file in _find(entry, _SUFFIXES[format_name])]
    for file, times in Counter(found).items():
        if times > 1:
            raise UsageError(f"input.path names {file} {times} times; keep one")
    return found


def _find(entry: str, suffixes: tuple[str, ...]) -> list[str]:
    try:
        return expand(entry, suffixes)
    except OSError as error:  # from names no file can have, and folders that may not be read
        reason = error.strerror or error
        raise DataError(f"input.path: {printable(entry, 200)}: {reason}") from None


def named_format(files: Sequence[str]) -> str:
    """The format that files are named for: jsonl where names end like it, else parquet.

    Raises:
        UsageError: they are named for both.
    """
    lines = [file for file in files if file.endswith(_LINES)]
    if lines and len(lines) < len(files):
        other = next(file for file in files if not file.endswith(_LINES))
        raise UsageError(
            f"input.path names files of two formats: {printable(lines[0])} and {printable(other)}",
            hint="set input.format to parquet or jsonl, or name only the one kind",
        )
    return "jsonl" if lines else "parquet"
