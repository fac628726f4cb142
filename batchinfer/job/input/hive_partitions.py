"""Reads columns from Hive-style folder names, as in ``lang=en/year=2026/x.parquet``.

Only folders below ``input.path`` become columns. In a glob, only folders from the first wildcard
onward become columns. If a file stores a column of the same name, the column is read from the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote

import pyarrow as pa

from batchinfer.errors import DataError
from batchinfer.job.storage.urls import fixed_part

_NULL = "__HIVE_DEFAULT_PARTITION__"
Values = Mapping[str, str | None]
"""Column values from a file's folder names, keyed by column; None means null."""


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
    """Convert the values from a file's folder names to the dataset's column types. Raise DataError
    if a value does not fit the column's type, which comes from other files."""
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
