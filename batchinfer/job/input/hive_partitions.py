"""Columns that the names of folders hold: ``lang=en/year=2026/x.parquet``, as Hive writes them.

Folders below the one that ``input.path`` names count, or from the first wildcard of a glob on. A
column that a file has itself is read from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from urllib.parse import unquote

import pyarrow as pa

from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import Format, InputFile, ReadRequest, Row, Rows
from batchinfer.job.storage.urls import fixed_part

_NULL = "__HIVE_DEFAULT_PARTITION__"
Values = Mapping[str, str | None]
"""Values of a file's rows by column; None is null."""


def folder_values(entries: Sequence[str], files: Sequence[str]) -> dict[str, Values]:
    """Columns and values that the folders of each file stand for.

    Args:
        entries: of ``input.path``.
        files: found there.
    """
    paths = map(PurePosixPath, entries)
    # What exists is taken as it is written, else an entry is a glob: below the first, none matches.
    bases = [base for path in paths for base in (path, fixed_part(path))]
    return {file: _values(PurePosixPath(file), bases) for file in files}


class HiveFormat:
    """Files of another format with the columns of their folders.

    Args:
        inner: reads the files.
        values: columns and values that the folders of each file stand for.
        types: of such columns, where they are known.
    """

    def __init__(
        self,
        inner: Format,
        values: Mapping[str, Values],
        types: Mapping[str, pa.DataType] | None = None,
    ) -> None:
        self.holds_requests = inner.holds_requests
        self._inner = inner
        self._values = values
        self._known = types or {}
        self._types: dict[str, pa.DataType] = {}
        """Types of the columns of folders that no file has itself."""
        self._constants: dict[str, dict[str, object]] = {}
        """Values of the columns that a file has from its folders, by file."""

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        file, schema = self._inner.inspect(path)
        values = self._values[path].items()
        own = {name: value for name, value in values if name not in schema.names}
        return replace(file, partition=own), schema

    def common_schema(self, files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
        """The columns of files and folders together.

        Raises:
            DataError: some files are in folders that others are not in, or a folder says what
                cannot be among the values that other files have there.
        """
        schema = self._inner.common_schema(files, schemas)
        names = [name for name in self._values[files[0].path] if name not in schema.names]
        for file in files:
            if list(self._values[file.path]) != list(self._values[files[0].path]):
                raise DataError(
                    f"{file.path} is in other key=value folders than {files[0].path}",
                    hint="name folders of one layout, or files",
                )
        self._types = {
            name: self._known.get(name) or _type([self._values[f.path][name] for f in files])
            for name in names
        }
        for name, kind in self._types.items():
            schema = schema.append(pa.field(name, kind))
        for file, own in zip(files, schemas, strict=True):
            values = self._values[file.path].items()
            self._constants[file.path] = {
                name: _typed(file.path, name, value, schema.field(name).type)
                for name, value in values
                if name not in own.names
            }
        return schema

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        constants, schema = self._constants[request.file.path], request.schema
        for first, batch in self._inner.scan(self._from_file(request)):
            arrays = [
                pa.repeat(pa.scalar(constants[name], schema.field(name).type), len(batch))
                if name in constants
                else batch.column(name)
                for name in request.columns
            ]
            yield first, pa.RecordBatch.from_arrays(arrays, names=list(request.columns))

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        constants = self._constants[request.file.path]
        for first, rows in self._inner.rows(self._from_file(request)):
            yield first, [_with(row, constants) for row in rows]

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        return self._inner.stored_bytes(file, columns)

    def _from_file(self, request: ReadRequest) -> ReadRequest:
        """The columns to read from the file: one at least, which says how many rows it has."""
        constants = self._constants[request.file.path]
        own = [name for name in request.columns if name not in constants]
        any_own = [name for name in request.schema.names if name not in self._types][:1]
        return replace(request, columns=own or any_own)


def _values(file: PurePosixPath, bases: Sequence[PurePosixPath]) -> Values:
    base = next(base for base in bases if file.is_relative_to(base))
    named = (part.partition("=") for part in file.relative_to(base).parts[:-1])
    return {
        unquote(key): None if value == _NULL else unquote(value)
        for key, equals, value in named
        if key and equals
    }


def _type(values: Sequence[str | None]) -> pa.DataType:
    """int64 where all that is there is a number as Python writes it, else string."""
    given = [value for value in values if value is not None]
    return pa.int64() if given and all(map(_is_int, given)) else pa.string()


def _is_int(text: str) -> bool:
    try:
        return str(int(text)) == text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False


def _typed(file: str, name: str, value: str | None, kind: pa.DataType) -> object:
    """A folder's text as a value of the column's type."""
    try:
        return None if value is None else pa.scalar(value).cast(kind).as_py()
    except pa.ArrowException:
        raise DataError(
            f"{file}: its folder says {name}={value}, where rows of other files hold {kind}",
            hint=f"give these rows a {name} of their own, or rename the folder",
        ) from None


def _with(row: Row, constants: Mapping[str, object]) -> Row:
    return row if isinstance(row, RowError) else {**row, **constants}
