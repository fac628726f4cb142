"""The files that ``input.path`` means, and their format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from batchinfer.console.format import printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.storage.reader import expand

_PARQUET = (".parquet",)
_LINES = tuple(
    name + packed for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst", ".bz2")
)
_CSV = tuple(name + packed for name in (".csv", ".tsv") for packed in ("", ".gz", ".zst", ".bz2"))
_ARROW = (".arrow", ".arrows", ".feather", ".ipc")
_NAMED: Mapping[str, tuple[str, ...]] = {
    "parquet": _PARQUET,
    "jsonl": _LINES,
    "csv": _CSV,
    "arrow": _ARROW,
}
"""Endings of names by the format that they stand for."""
_SUFFIXES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    # What lies beside Parquet or JSON Lines is most often about them.
    "auto": ((*_PARQUET, *_LINES), tuple(chain.from_iterable(_NAMED.values()))),
    **{name: (endings,) for name, endings in _NAMED.items()},
    "openai-batch": (_LINES,),
}
"""Endings of names that are data in folders, by ``input.format``; where there are none, the next
ones."""


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
    found = [file for entry in entries for file in _find(entry, *_SUFFIXES[format_name])]
    for file, times in Counter(found).items():
        if times > 1:
            raise UsageError(f"input.path names {file} {times} times; keep one")
    return found


def _find(entry: str, suffixes: tuple[str, ...], *others: tuple[str, ...]) -> list[str]:
    try:
        return expand(entry, suffixes)
    except DataError:
        if not others:
            raise
        return _find(entry, *others)
    except OSError as error:  # from names no file can have, and folders that may not be read
        reason = error.strerror or error
        raise DataError(f"input.path: {printable(entry, 200)}: {reason}") from None


def named_format(files: Sequence[str]) -> str:
    """The format that files are named for; parquet where names say nothing.

    Raises:
        UsageError: they are named for several.
    """
    first_of: dict[str, str] = {}
    for file in files:
        first_of.setdefault(_format_of(file), file)
    if len(first_of) > 1:
        (name, one), (other_name, other), *_ = first_of.items()
        raise UsageError(
            f"input.path names files of two formats: {printable(one)} and {printable(other)}",
            hint=f"set input.format to {name} or {other_name}, or name only the one kind",
        )
    return next(iter(first_of))


def is_named(path: str) -> bool:
    """Whether a path is named like a file of data."""
    return path.endswith(tuple(chain.from_iterable(_NAMED.values())))


def _format_of(file: str) -> str:
    return next((name for name, ends in _NAMED.items() if file.endswith(ends)), "parquet")
