"""Finds the files of ``input.path``, their format, and columns from folder names.

Hive-style folder names, as in ``lang=en/year=2026/x.parquet``, become columns. Only folders below
``input.path`` count; in a glob, only folders from the first wildcard onward. If a file stores a
column of the same name, the column is read from the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import PurePosixPath
from urllib.parse import unquote

import pyarrow as pa

from batchinfer.console.format import printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.storage.reader import expand
from batchinfer.job.storage.urls import fixed_part

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
    # A CSV file next to Parquet or JSON Lines files usually describes them and holds no prompts. So
    # does a JSON file next to files of any other format.
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

_NULL = "__HIVE_DEFAULT_PARTITION__"
Values = Mapping[str, str | None]
"""Column values from a file's folder names, keyed by column; None means null."""


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
    """Derive the format from file names. A file with an unknown suffix is treated as Parquet.

    Raises:
        UsageError: the names belong to several formats.
    """
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


def folder_values(entries: Sequence[str], files: Sequence[str]) -> dict[str, Values]:
    """Read columns and values from the folder names of each file.

    Args:
        entries: the entries of ``input.path``.
        files: paths of the files in these entries.
    """
    paths = map(PurePosixPath, entries)
    # Files that match a glob are below the glob's fixed part (the folders before a wildcard).
    bases = [base for path in paths for base in (path, fixed_part(path))]
    return {file: _values(PurePosixPath(file), bases) for file in files}


def _values(file: PurePosixPath, bases: Sequence[PurePosixPath]) -> Values:
    base = next(base for base in bases if file.is_relative_to(base))
    named = (part.partition("=") for part in file.relative_to(base).parts[:-1])
    return {
        unquote(key): None if value == _NULL else unquote(value)
        for key, equals, value in named
        if key and equals
    }


def add_folder_columns(schema: pa.Schema, folders: Mapping[str, Values]) -> pa.Schema:
    """Add the columns from folder names to the schema of the files.

    Args:
        folders: each file's values, keyed by the file's path.

    Raises:
        DataError: two files are in folders with different column names.
    """
    first, names = next(iter(folders.items()))
    for file, values in folders.items():
        if list(values) != list(names):
            raise DataError(
                f"{file} and {first} are in key=value folders with different keys",
                hint="set input.path to folders with the same keys, or to a list of the files",
            )
    for name in names:
        if name not in schema.names:
            kind = _type([values[name] for values in folders.values()])
            schema = schema.append(pa.field(name, kind))
    return schema


def constants(path: str, own: Values, schema: pa.Schema) -> dict[str, object]:
    """Convert the values from a file's folder names to the dataset's column types.

    Raises:
        DataError: a value does not fit the column's type, which comes from other files.
    """
    found: dict[str, object] = {}
    for name, value in own.items():
        kind = schema.field(name).type
        try:
            found[name] = None if value is None else pa.scalar(value).cast(kind).as_py()
        except (pa.ArrowException, ValueError):  # ValueError: the time is outside of Python's range
            raise DataError(
                f"{path}: the folder name says {name}={value}, but {name} has type "
                f"{kind} in other files",
                hint=f"add a column {name} to this file, or rename the folder",
            ) from None
    return found


def _type(values: Sequence[str | None]) -> pa.DataType:
    """Return int64 if every value is an integer in Python's notation, else string."""
    given = [value for value in values if value is not None]
    return pa.int64() if given and all(map(_is_int, given)) else pa.string()


def _is_int(text: str) -> bool:
    try:
        return str(int(text)) == text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False
