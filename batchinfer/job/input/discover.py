"""Finds the files of ``input.path``, and their format."""

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
    "json": tuple(".json" + packed for packed in _COMPRESSED),
}
"""File name suffixes, keyed by format."""
_ALL = tuple(chain.from_iterable(_NAMED.values()))
_SUFFIXES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    # A CSV file next to Parquet or JSON Lines files usually describes those files and holds no
    # prompts. The same is true of a JSON file next to files of any other format.
    "auto": (
        (*_NAMED["parquet"], *_NAMED["jsonl"]),
        (*_NAMED["csv"], *_NAMED["arrow"]),
        _ALL,
    ),
    **{name: (suffixes,) for name, suffixes in _NAMED.items()},
    "openai-batch": (_NAMED["jsonl"],),
}
"""Suffixes of the files to read in a folder, keyed by ``input.format``. Each tuple of suffixes is
tried only if no file matches an earlier tuple.
"""


def find_files(path: str | Sequence[str], format_name: str = "auto") -> list[str]:
    """Find the files of ``path``: entries in list order, globs and directories in path order.

    Directories are searched recursively. Directories and globs skip files and folders whose names
    begin with ``.`` or ``_``, unless the glob itself contains that character.

    Raises:
        DataError: an entry matches no file, or cannot be read.
        StorageError: an object store does not answer.
        UsageError: two entries name the same file.
    """
    entries = [path] if isinstance(path, str) else list(path)
    paths = [file for entry in entries for file in _find(entry, *_SUFFIXES[format_name])]
    for file, times in Counter(paths).items():
        if times > 1:
            raise UsageError(f"input.path names {file} {times} times; keep one")
    return paths


def _find(entry: str, suffixes: tuple[str, ...], *fallbacks: tuple[str, ...]) -> list[str]:
    try:
        return expand(entry, suffixes)
    except DataError:
        if not fallbacks:
            raise
        return _find(entry, *fallbacks)
    except OSError as error:  # for example an invalid name, or no permission
        reason = error.strerror or error
        raise DataError(f"input.path: {printable(entry, 200)}: {reason}") from None


def named_format(files: Sequence[str]) -> str:
    """Derive the format from file names; unknown suffixes mean Parquet. Raise UsageError if the
    names belong to several formats."""
    first_of: dict[str, str] = {}
    for file in files:
        name = next((name for name, ends in _NAMED.items() if file.endswith(ends)), "parquet")
        first_of.setdefault(name, file)
    if len(first_of) > 1:
        (name, one), (other_name, other), *_ = first_of.items()
        raise UsageError(
            f"input.path names files of two formats: {printable(one)} and {printable(other)}",
            hint=f"set input.format to {name} or {other_name}, or name files of one format only",
        )
    return next(iter(first_of))


def is_named(path: str) -> bool:
    """Return True if a path ends in the suffix of a data file."""
    return path.endswith(_ALL)
