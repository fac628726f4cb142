"""The prompt dataset: files read in order as one table, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

import numpy as np
import pyarrow as pa

from batchinfer.console.format import format_value, listed, near_name, printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.discover import find_files, named_format
from batchinfer.job.input.filter import Condition, select_rows
from batchinfer.job.input.format import (
    BATCH_ROWS,
    FileColumns,
    Format,
    InputFile,
    ReadRequest,
    Row,
    Rows,
    check_unchanged,
)
from batchinfer.job.input.formats.arrow_ipc import ArrowFormat
from batchinfer.job.input.formats.csv import CsvFormat
from batchinfer.job.input.formats.table import open_table, table_format
from batchinfer.job.input.hive_partitions import (
    Values,
    add_folder_columns,
    constants,
    folder_values,
)
from batchinfer.job.input.jsonl import JsonlFormat
from batchinfer.job.input.openai_batch import OpenAIFormat
from batchinfer.job.input.parquet import ParquetFormat
from batchinfer.job.input.union import Difference, SchemaMode
from batchinfer.job.input.unique_ids import BadIds
from batchinfer.job.row_ids import Part, RowIds, in_range, ranges_of

_FORMATS: Mapping[str, Callable[[], Format]] = {
    "parquet": ParquetFormat,
    "jsonl": JsonlFormat,
    "csv": CsvFormat,
    "arrow": ArrowFormat,
    "openai-batch": OpenAIFormat,
}
"""Formats of files by ``input.format``."""

_Piece = TypeVar("_Piece", pa.RecordBatch, list[Row])
_Pieces = Iterator[tuple[int, _Piece]]


@dataclass(frozen=True)
class Source:
    """The files of a dataset, read one after the other."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: int
    """Selected rows: those that meet ``filter``, at most ``limit``."""
    format: Format
    file_columns: Mapping[str, FileColumns] = field(default_factory=dict)
    """By path."""
    selection: RowIds | None = None
    """Ids of the selected rows, which keep the ids they have in the whole; None: the first ones."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """Columns that differ from file to file: they are in ``schema`` and cannot be read."""
    version: int | None = None
    """Version of the table that the files belong to; None: they are not a table."""
    bad_ids: BadIds | None = None
    """Rows that are errors because of their ids; None: ids were not checked."""

    @property
    def rows_there(self) -> range:
        """A range of row ids that holds all selected rows."""
        if self.selection is None:
            return range(self.num_rows)
        return range(sum(file.num_rows for file in self.files))

    def count(self, rows: range) -> int:
        """Number of selected rows in ``rows``."""
        return len(rows) if self.selection is None else len(in_range(self.selection, rows))

    def row_ids(self, rows: range) -> RowIds:
        """The selected rows in ``rows``."""
        if self.selection is None:
            return np.arange(rows.start, rows.stop)
        return in_range(self.selection, rows)

    def bounds(self, rows_per_part: int) -> tuple[int, ...] | None:
        """The first row id of each part, and the end of the last part; None without a filter."""
        if self.selection is None:
            return None
        if not len(self.selection):
            return 0, 0
        return *self.selection[::rows_per_part].tolist(), int(self.selection[-1]) + 1

    def require(self, columns: Iterable[str], key: str) -> None:
        """Check that the dataset has ``columns``, which ``key`` of the job file names.

        Raises:
            DataError: names the missing column and the existing ones.
        """
        for name in columns:
            if name not in self.schema.names:
                raise DataError(
                    f"{key}: {self.files[0].path} has no column {format_value(name)}"
                    + near_name(name, self.schema.names),
                    hint=printable(f"its columns are: {listed(self.schema.names)}"),
                )

    def require_alike(self, columns: Iterable[str], *, only_kept: bool = False) -> None:
        """Check that columns are the same in all files, or united.

        Args:
            only_kept: only ``input.keep_columns`` names them.

        Raises:
            DataError: one differs; shows two files.
        """
        for name in columns:
            if name in self.differences:
                raise self.differences[name].error(only_kept=only_kept)

    def check_unchanged(self) -> None:
        """Check that every file is still the one that was opened.

        Raises:
            DataError: one was changed or removed.
        """
        for file in self.files:
            try:
                check_unchanged(file)
            except OSError as error:
                raise DataError(
                    f"{file.path} cannot be read any more: {error.strerror or error}",
                    hint="put it back, then run again: finished rows are kept",
                ) from None

    def scan(
        self, columns: Sequence[str], ranges: Iterable[range]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read ``columns`` of the rows in ``ranges``, once through the files.

        Args:
            columns: names of top-level columns; batches have them in this order.
            ranges: row ids to read, ascending and disjoint; rows not selected are left out.

        Yields:
            The row id of a batch's first row, and the batch: at most ``BATCH_ROWS`` consecutive
            rows of one range.

        Raises:
            DataError: names the file and the place in it that cannot be read.
        """
        return self._read(self.format.batches, columns, ranges)

    def rows(self, columns: Sequence[str], ranges: Iterable[range]) -> Iterator[Rows]:
        """Read ``columns`` of the rows in ``ranges`` as Python values, once through the files.

        Texts are ``str`` or UTF-8 bytes. A value or a row that cannot be read is a ``RowError``,
        and so is a row of ``bad_ids``.
        """
        pieces = self._read(self.format.rows, columns, ranges)
        return pieces if self.bad_ids is None else map(self.bad_ids.mark, pieces)

    def batches(
        self, columns: Sequence[str], parts: Sequence[Part], ranges: Iterable[range] | None = None
    ) -> Iterator[tuple[list[int], list[Row]]]:
        """Read rows as ``rows`` does, in full batches even if the rows are scattered.

        Args:
            parts: parts that hold the rows, in order.
            ranges: only these rows, in order, each range in one part; None: all of the parts.

        Yields:
            Row ids and rows, all of one part: ``BATCH_ROWS`` or a few more, or the rest of the
            part.
        """
        ranges = [part.rows for part in parts] if ranges is None else list(ranges)
        first_rows = [part.rows.start for part in parts]
        pieces = self.rows(columns, ranges)
        for _, of_part in groupby(ranges, key=lambda rows: bisect_right(first_rows, rows.start)):
            missing = sum(map(self.count, of_part))
            while missing:
                row_ids: list[int] = []
                rows: list[Row] = []
                while len(rows) < min(missing, BATCH_ROWS):
                    first_row, piece = next(pieces)
                    row_ids.extend(range(first_row, first_row + len(piece)))
                    rows.extend(piece)
                missing -= len(rows)
                yield row_ids, rows

    def _read(
        self,
        read: Callable[[ReadRequest], _Pieces[_Piece]],
        columns: Sequence[str],
        ranges: Iterable[range],
    ) -> _Pieces[_Piece]:
        if self.selection is not None:  # skip long stretches where no row is selected
            selected = (in_range(self.selection, rows) for rows in ranges)
            ranges = (near for row_ids in selected for near in ranges_of(row_ids, BATCH_ROWS))
        wanted = deque(rows for rows in ranges if len(rows))
        first_row = 0
        for file in self.files:
            if not wanted:
                return
            if wanted[0].start < first_row + file.num_rows:
                of_file = self.file_columns[file.path]
                request = ReadRequest(file, first_row, columns, self.schema, of_file, wanted)
                for first, piece in read(request):
                    yield from self._selected(first, piece)
            first_row += file.num_rows

    def _selected(self, first_row: int, piece: _Piece) -> _Pieces[_Piece]:
        """Runs of selected rows in a piece of the dataset, each with its first row's id."""
        if self.selection is None:
            yield first_row, piece
            return
        for rows in ranges_of(self.row_ids(range(first_row, first_row + len(piece)))):
            yield rows.start, piece[rows.start - first_row : rows.stop - first_row]


def open_source(
    path: str | Sequence[str],
    limit: int | None = None,
    format_name: str = "auto",
    condition: str | None = None,
    mode: SchemaMode = "strict",
    version: int | None = None,
) -> Source:
    """Find the files behind ``path`` and check that they can be read together.

    Args:
        path: a file, a glob, a directory (searched for the names of data files), or a list of
            these, local or in an object store. Folders in it that are named key=value are columns.
        limit: use only this many rows, of those that meet the condition.
        format_name: ``input.format``.
        condition: ``input.filter``; this function reads the files to find the rows that meet it.
        mode: ``input.schema``.
        version: of a table; None: the latest.

    Raises:
        DataError: there is no file, a file cannot be read, or files differ in the columns that
            the condition reads.
        StorageError: an object store does not answer.
        UsageError: ``auto``, and the names stand for two formats; a wrong condition.
    """
    paths = [path] if isinstance(path, str) else path
    kind = table_format(paths, format_name)
    if kind is not None:
        table = open_table(paths[0], kind, version)
        whole = _open_files(ParquetFormat(), table.partitions, "union", table.schema)
        return _select(replace(whole, version=table.version), limit, condition)
    if version is not None:
        raise UsageError("input.version: only tables (delta, iceberg) have versions")
    names = find_files(path, format_name)
    chosen = _FORMATS[named_format(names) if format_name == "auto" else format_name]()
    folders = folder_values(paths, names)
    if chosen.holds_requests:  # their columns are fixed
        folders = {name: {} for name in names}
    return _select(_open_files(chosen, folders, mode), limit, condition)


def _open_files(
    chosen: Format,
    folders: Mapping[str, Values],
    mode: SchemaMode,
    table_schema: pa.Schema | None = None,
) -> Source:
    """All rows of some files.

    Args:
        folders: each file's columns from its folders.
        table_schema: the columns, whatever the files hold.
    """
    files: list[InputFile] = []
    schemas: dict[str, pa.Schema] = {}
    before = pa.schema([])
    for path, values in folders.items():
        file, found = chosen.inspect(path)
        found = found.remove_metadata()
        before = schemas[path] = before if before.equals(found, check_metadata=True) else found
        partition = {name: value for name, value in values.items() if name not in found.names}
        files.append(replace(file, partition=partition))
    if type(chosen) is JsonlFormat and not any(file.num_rows for file in files):
        raise DataError(f"{files[0].path} holds no rows: all of its lines are blank")
    schema, differences = chosen.unite(schemas, mode)
    if table_schema is not None:
        schema, differences = table_schema, {}
    schema = add_folder_columns(schema, folders)
    columns = {
        file.path: FileColumns(
            schemas[file.path],
            constants(file.path, file.partition or {}, schema),
            frozenset(differences),
        )
        for file in files
    }
    num_rows = sum(file.num_rows for file in files)
    return Source(tuple(files), schema, num_rows, chosen, columns, differences=differences)


def _select(whole: Source, limit: int | None, condition: str | None) -> Source:
    """Limit a dataset to the first rows that meet a condition."""
    if condition is None:
        total = whole.num_rows
        return replace(whole, num_rows=total if limit is None else min(total, limit))
    meets = Condition(condition, whole.schema)
    whole.require_alike(meets.columns)
    selection = select_rows(meets, whole.scan(meets.columns, [whole.rows_there]), limit)
    return replace(whole, num_rows=len(selection), selection=selection)
