"""The base class of file formats: reads one file as a part of the dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from batchinfer.console.format import first_line, format_value
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.invalid_utf8 import check_field_names, python_rows, with_valid_text
from batchinfer.job.input.unify_schemas import (
    Difference,
    SchemaMode,
    same,
    shown_type,
    united,
    widened,
)
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.reader import store_of

BATCH_ROWS = 1024
REWRITE = "write it again, or leave it out of input.path"
"""Advice to the user about a file that cannot be read."""
SAMPLING_COLUMN = "sampling_params"
"""The column that holds a row's own sampling parameters."""
READ_ERRORS = (pa.ArrowException, OSError, UnicodeError)
"""Errors that reading a file can raise. Column names that are not UTF-8 raise UnicodeError."""

Row = Mapping[str, Any] | RowError
"""A row's values, keyed by column, or the error that explains why the row cannot be read."""
Rows = tuple[int, list[Row]]
"""The row id of the first row, and a list of consecutive rows."""
_Piece = TypeVar("_Piece", pa.RecordBatch, list[Any])


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the dataset, as it was when the job was planned."""

    path: str
    size: int
    mtime_ns: int
    num_rows: int
    content_sha256: str
    """Hash of a Parquet file's footer, or of any other file's decompressed content."""
    etag: str | None = None
    ctime_ns: int = field(default=0, compare=False)
    """Time of the last change, including renames. This time is compared only within a run, because
    a file may be moved between runs."""
    content_hash: str | None = None
    """Hash of the whole content: from the function ``content_hash`` for Parquet files, else equal
    to ``content_sha256``. None if unknown; files in an object store are identified by ``etag``."""
    partition: Mapping[str, str | None] | None = None
    """Values of the columns that come from folder names; None if unknown."""
    replaced_cells: int = field(default=0, compare=False)
    """Number of cells with bytes that are invalid in the file's encoding; these bytes are read as
    U+FFFD."""

    @classmethod
    def of(
        cls,
        path: str,
        stat: FileStat,
        num_rows: int,
        content_sha256: str,
        content_hash: str | None = None,
    ) -> InputFile:
        """Return a file with the size and times of ``stat`` and no columns from folder names."""
        facts = (stat.size, stat.mtime_ns, num_rows, content_sha256, stat.etag, stat.ctime_ns)
        return cls(path, *facts, content_hash, {})


@dataclass(frozen=True, slots=True)
class FileColumns:
    """For one file, the source of each column of the dataset. A column without a source is null."""

    own: pa.Schema
    """Columns stored in the file."""
    constants: Mapping[str, Any]
    """Columns from folder names: one value for all rows of the file."""
    differing: Collection[str]
    """Columns that are read as null, because their types differ between files."""

    def in_file(self, columns: Sequence[str]) -> list[str]:
        names = self.own.names
        return [name for name in columns if name in names and name not in self.differing]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    file: InputFile
    first_row: int
    """Row id of the first row of the file."""
    columns: Sequence[str]
    schema: pa.Schema
    """Schema of the whole dataset."""
    file_columns: FileColumns
    wanted: deque[range]
    """Row ids to read in this file and later files, ascending and disjoint. ``cut`` removes ranges
    that have been read."""


class Format(ABC):
    """A file format.

    If a file cannot be read, the methods that read it raise a DataError that names the file.
    Methods that return iterators yield pairs: the id of the first row, and at most ``BATCH_ROWS``
    consecutive rows.
    """

    holds_requests = False
    """True if each row is a request with its prompt and sampling parameters."""
    has_unchecked_text = False
    """True if ``inspect`` does not notice text that is not UTF-8."""
    replaces_bad_text = False
    """True if ``rows`` replaces invalid bytes in text with U+FFFD."""

    @abstractmethod
    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        """Read a file's size, number of rows, hash and schema."""

    @abstractmethod
    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read batches of columns that are stored in the file."""

    def unite(
        self, schemas: Mapping[str, pa.Schema], mode: SchemaMode
    ) -> tuple[pa.Schema, Mapping[str, Difference]]:
        """Merge the schemas of files; also return the columns whose types cannot be merged.

        Args:
            schemas: schema of each file, keyed by path.
            mode: ``input.schema``.
        """
        return united(schemas, mode, widened if mode == "union" else same)

    def batches(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read batches with the columns and types of the dataset."""
        stored = request.file_columns.in_file(request.columns)
        # At least one column must be read, because it gives the number of rows.
        columns = stored or request.file_columns.own.names[:1]
        for first, batch in self.scan(replace(request, columns=columns)):
            whole = [_conformed(batch, stored, request)]
            del batch  # free a huge batch before the next one is read
            yield first, whole.pop()

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Read rows as Python values; texts may be UTF-8 bytes."""
        for name in request.columns:
            check_field_names(request.schema.field(name))
        for first, batch in self.batches(request):
            if self.replaces_bad_text:
                arrays = [with_valid_text(column) for column in batch.columns]
                batch = pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
                del arrays
            rows: list[Row] = list(python_rows(batch))
            del batch  # free a huge batch before the next one is read
            yield first, rows

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        """Estimate the bytes that the columns take in an output file.

        The estimate for text and Arrow files is a third of their size, which is about what
        Parquet's compression achieves.
        """
        return file.size // 3 if columns else 0


def _conformed(batch: pa.RecordBatch, own: Sequence[str], request: ReadRequest) -> pa.RecordBatch:
    """Convert a batch to the requested columns and types of the dataset.

    Columns in ``own`` are cast, constants are repeated for each row, and other columns are null.
    """
    fields = [request.schema.field(name) for name in request.columns]
    if batch.schema.equals(pa.schema(fields)):
        return batch
    if not fields:
        return batch.select([])  # has no columns, but keeps the number of rows
    arrays, constants = [], request.file_columns.constants
    for column in fields:
        if column.name in own:
            arrays.append(_cast(batch.column(column.name), column, request.file.path))
        elif column.name in constants:
            value = pa.scalar(constants[column.name], column.type)
            arrays.append(pa.repeat(value, len(batch)))
        else:
            arrays.append(pa.nulls(len(batch), column.type))
    return pa.RecordBatch.from_arrays(arrays, names=[f.name for f in fields])


def _cast(array: pa.Array, column: pa.Field, path: str) -> pa.Array:
    if array.type == column.type:
        return array
    try:
        return array.cast(column.type)
    except pa.ArrowException as error:  # the data is damaged, or Arrow has no such cast
        raise DataError(
            f"{path}: column {format_value(column.name)} cannot be read as "
            f"{shown_type(column.type)}: {first_line(error)}",
            hint=REWRITE,
        ) from error


def check_unchanged(file: InputFile) -> None:
    """Check that a file has not changed since the job was planned.

    Raises:
        DataError: the file has changed.
        OSError: the file no longer exists.
    """
    stat = store_of(file.path).stat(file.path)
    if (stat.size, stat.mtime_ns, stat.etag) != (file.size, file.mtime_ns, file.etag):
        raise DataError(
            f"{file.path} was changed while the job was running",
            hint="restore the file and run again, or start over with --overwrite",
        )
    if stat.ctime_ns != file.ctime_ns:  # size and mtime can be restored on purpose
        raise DataError(
            f"{file.path}: its content, name, links or permissions were changed "
            "while the job was running",
            hint="if its content is the same as before, run again (finished rows are "
            "kept); if not, start over with --overwrite",
        )


def cut(batch: _Piece, row: int, wanted: deque[range]) -> Iterator[tuple[int, _Piece]]:
    """Cut the rows in ``wanted`` out of a batch; yield pieces, each with the id of its first row.

    Remove from ``wanted`` the ranges whose last row is in the batch.

    Args:
        row: id of the batch's first row.
        wanted: row ids, ascending and disjoint.
    """
    stop = row + len(batch)
    while wanted and wanted[0].start < stop:
        rows = range(max(wanted[0].start, row), min(wanted[0].stop, stop))
        if rows:
            yield rows.start, batch[rows.start - row : rows.stop - row]
        if wanted[0].stop > stop:
            return
        wanted.popleft()
