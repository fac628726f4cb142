"""The files that ``input.path`` means, and their format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from batchinfer.console.format import printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.storage.reader import expand

_COMPRESSED = ("", ".gz", ".zst", ".bz2")
_NAMED: Mapping[str, tuple[str, ...]] = {
    "parquet": (".parquet",),
    "jsonl": tuple(name + packed for name in (".jsonl", ".ndjson") for packed in _COMPRESSED),
    "csv": tuple(name + packed for name in (".csv", ".tsv") for packed in _COMPRESSED),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
}
"""Suffixes of the files of each format."""
_ALL = tuple(chain.from_iterable(_NAMED.values()))
_SUFFIXES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    # A CSV file next to Parquet or JSON Lines is most often about them, not data.
    "auto": ((*_NAMED["parquet"], *_NAMED["jsonl"]), _ALL),
    **{name: (suffixes,) for name, suffixes in _NAMED.items()},
    "openai-batch": (_NAMED["jsonl"],),
}
"""Suffixes of data files in folders, by ``input.format``; the second is tried if the first finds
nothing."""


def find_files(path: str | Sequence[str], format_name: str = "auto") -> list[str]:
    """Files meant by ``path``: entries in the order given, globs and directories in path order.

    Directories are searched with their subdirectories. They and globs skip files and folders whose
    names begin with ``.`` or ``_``, unless the glob itself contains that.

    Raises:
        DataError: an entry matches no file, or cannot be read.
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
    except OSError as error:  # a name that no file can have, or no permission
        reason = error.strerror or error
        raise DataError(f"input.path: {printable(entry, 200)}: {reason}") from None


def named_format(files: Sequence[str]) -> str:
    """The format that files' names stand for; parquet if they have no known suffix.

    Raises:
        UsageError: they stand for several formats.
    """
    first_of: dict[str, str] = {}
    for file in files:
        name = next((name for name, ends in _NAMED.items() if file.endswith(ends)), "parquet")
        first_of.setdefault(name, file)
    if len(first_of) > 1:
        (name, one), (other_name, other), *_ = first_of.items()
        raise UsageError(
            f"input.path names files of two formats: {printable(one)} and {printable(other)}",
            hint=f"set input.format to {name} or {other_name}, or name only the one kind",
        )
    return next(iter(first_of))


def is_named(path: str) -> bool:
    """Whether a path is named like a data file."""
    return path.endswith(_ALL)
