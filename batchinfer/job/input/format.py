"""The formats of a dataset's files, and how one file is read as a part of the dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from batchinfer.console.format import first_line, format_value
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.arrow_text import python_rows
from batchinfer.job.input.union import Difference, SchemaMode, same, shown_type, united, widened
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.reader import store_of

BATCH_ROWS = 1024
"""Most rows read at a time."""
REWRITE = "write it again, or leave it out of input.path"
"""What to do about a file that cannot be read."""
SAMPLING_COLUMN = "sampling_params"
"""The column that holds a row's own sampling parameters."""
READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Errors of reading a file. Column names that are not UTF-8 raise the last one."""

Row = Mapping[str, Any] | RowError
"""A row's values by column, or why it cannot be read."""
Rows = tuple[int, list[Row]]
"""The row id of the first of several consecutive rows, and the rows."""
_Piece = TypeVar("_Piece", pa.RecordBatch, list[Any])


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the dataset, as it was when it was planned."""

    path: str
    size: int
    mtime_ns: int
    num_rows: int
    content_sha256: str
    """Of a Parquet file's footer; of other files' content, decompressed."""
    etag: str | None = None
    """An object store's mark of the content."""
    ctime_ns: int = field(default=0, compare=False)
    """Compared within a run only: between runs a file may be copied or moved and be the same."""
    content_hash: str | None = None
    """Hash of the whole content: ``content_hash`` of a Parquet file, else ``content_sha256``. None:
    not known; in a store ``etag`` serves."""
    partition: Mapping[str, str | None] | None = None
    """Columns that the names of its folders hold, and their values; None: not known."""

    @classmethod
    def of(
        cls,
        path: str,
        stat: FileStat,
        num_rows: int,
        content_sha256: str,
        content_hash: str | None = None,
    ) -> InputFile:
        """A file with the size and times of ``stat`` and no columns of folders."""
        facts = (stat.size, stat.mtime_ns, num_rows, content_sha256, stat.etag, stat.ctime_ns)
        return cls(path, *facts, content_hash, {})


@dataclass(frozen=True, slots=True)
class FileColumns:
    """Where a file's rows get the dataset's columns from; a column that is nowhere is null."""

    own: pa.Schema
    """The columns that the file itself has."""
    constants: Mapping[str, Any]
    """Columns from the names of its folders: each has one value in all rows."""
    differing: Collection[str]
    """Columns of the dataset that cannot be read as one; they come out null."""

    def in_file(self, columns: Sequence[str]) -> list[str]:
        """Those of ``columns`` that are read from the file."""
        names = self.own.names
        return [name for name in columns if name in names and name not in self.differing]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Columns of some rows of one file."""

    file: InputFile
    first_row: int
    """Row id of the first row of the file."""
    columns: Sequence[str]
    schema: pa.Schema
    """Of the whole dataset."""
    file_columns: FileColumns
    wanted: deque[range]
    """Row ids, ascending and disjoint, of later files too; ``cut`` drops what has been read."""


class Format(ABC):
    """A kind of file that holds rows.

    Methods that read raise DataError, naming the file, where it cannot be read. They yield at most
    ``BATCH_ROWS`` rows at a time, all of one range, with the row id of the first.
    """

    holds_requests = False
    """Whether each row says itself what its prompt is, and how it is sampled."""

    @abstractmethod
    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        """Size, rows and hash of a file, and its columns."""

    @abstractmethod
    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of columns that the file itself has."""

    def unite(
        self, schemas: Mapping[str, pa.Schema], mode: SchemaMode
    ) -> tuple[pa.Schema, Mapping[str, Difference]]:
        """The columns of several files together, and those that cannot be read as one.

        Args:
            schemas: by path.
            mode: ``input.schema``.
        """
        return united(schemas, mode, widened if mode == "union" else same)

    def batches(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches with the columns and types of the dataset."""
        own = request.file_columns.in_file(request.columns)
        # At least one column is read: it says how many rows there are.
        columns = own or request.file_columns.own.names[:1]
        for first, batch in self.scan(replace(request, columns=columns)):
            whole = [_conformed(batch, own, request)]
            del batch  # free a huge batch before the next one is read
            yield first, whole.pop()

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Rows as Python values; texts may be UTF-8 bytes."""
        for first, batch in self.batches(request):
            rows: list[Row] = list(python_rows(batch))
            del batch  # free a huge batch before the next one is read
            yield first, rows

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        """About how many bytes the columns will take in an output file.

        Of text and Arrow files that is a third of the size: about what they compress to.
        """
        return file.size // 3 if columns else 0


def _conformed(batch: pa.RecordBatch, own: Sequence[str], request: ReadRequest) -> pa.RecordBatch:
    """A batch with the dataset's columns: ``own`` cast, constants repeated, the others null."""
    fields = [request.schema.field(name) for name in request.columns]
    if batch.schema.equals(pa.schema(fields)):
        return batch
    if not fields:
        return batch.select([])  # which keeps the number of rows
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
    """Check that a file is still the one that was planned.

    Raises:
        DataError: it was written again.
        OSError: it is no longer there.
    """
    stat = store_of(file.path).stat(file.path)
    if (stat.size, stat.mtime_ns, stat.etag) != (file.size, file.mtime_ns, file.etag):
        raise DataError(
            f"{file.path} was changed while the job ran",
            hint="put it back and run again, or start over with --overwrite",
        )
    if stat.ctime_ns != file.ctime_ns:  # size and mtime can be restored on purpose
        raise DataError(
            f"{file.path} was changed while the job ran, or its name, links or permissions were",
            hint="if its content is as before, run again: finished rows are kept; if not, start "
            "over with --overwrite",
        )


def cut(batch: _Piece, row: int, wanted: deque[range]) -> Iterator[tuple[int, _Piece]]:
    """Pieces of a batch that ``wanted`` asks for, each with its first row's id.

    Drops ranges from ``wanted`` that the batch completes.

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
