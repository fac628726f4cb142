"""Columns that the names of folders hold: ``lang=en/year=2026/x.parquet``, as Hive writes them.

Folders count below the one that ``input.path`` names, or from the first wildcard of a glob on. A
column that a file has itself is read from the file.
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
"""A file's columns from folders, with their values; None is null."""


def folder_values(entries: Sequence[str], files: Sequence[str]) -> dict[str, Values]:
    """The columns and values in the folder names of each file.

    Args:
        entries: of ``input.path``.
        files: found there.
    """
    paths = map(PurePosixPath, entries)
    # A path that exists counts as written; else it is a glob, which no file is below.
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
    """The columns of files and their folders together.

    Args:
        schema: of the files.
        folders: values by file.

    Raises:
        DataError: files are in folders of different columns.
    """
    first, names = next(iter(folders.items()))
    for file, values in folders.items():
        if list(values) != list(names):
            raise DataError(
                f"{file} is in other key=value folders than {first}",
                hint="name folders of one layout, or files",
            )
    for name in names:
        if name not in schema.names:
            kind = _type([values[name] for values in folders.values()])
            schema = schema.append(pa.field(name, kind))
    return schema


def constants(path: str, own: Values, schema: pa.Schema) -> dict[str, object]:
    """A file's columns from folders, as values of the dataset's types.

    Raises:
        DataError: a value is not of the column's type, which other files decided.
    """
    found: dict[str, object] = {}
    for name, value in own.items():
        kind = schema.field(name).type
        try:
            found[name] = None if value is None else pa.scalar(value).cast(kind).as_py()
        except (pa.ArrowException, ValueError):  # ValueError: a time that Python does not have
            raise DataError(
                f"{path}: its folder says {name}={value}, where rows of other files hold {kind}",
                hint=f"give these rows a {name} of their own, or rename the folder",
            ) from None
    return found


def _type(values: Sequence[str | None]) -> pa.DataType:
    """int64 where every value is an integer as Python writes it, else string."""
    given = [value for value in values if value is not None]
    return pa.int64() if given and all(map(_is_int, given)) else pa.string()


def _is_int(text: str) -> bool:
    try:
        return str(int(text)) == text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False
