"""The input dataset: reads its files in order as one table, in bounded memory."""

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
from batchinfer.job.input.formats.json import JsonFormat
from batchinfer.job.input.formats.options import DEFAULT_OPTIONS, TextOptions
from batchinfer.job.input.formats.table import TABLES, open_table, table_format
from batchinfer.job.input.formats.text_file import TextFormat
from batchinfer.job.input.hive_partitions import (
    Values,
    add_folder_columns,
    constants,
    folder_values,
)
from batchinfer.job.input.jsonl import JsonlFormat
from batchinfer.job.input.openai_batch import OpenAIFormat
from batchinfer.job.input.parquet import ParquetFormat
from batchinfer.job.input.unify_schemas import Difference, SchemaMode
from batchinfer.job.input.unique_ids import BadIds
from batchinfer.job.row_ranges import Part, RowIds, in_range, ranges_of

_FORMATS: Mapping[str, Callable[[], Format]] = {
    "parquet": ParquetFormat,
    "arrow": ArrowFormat,
    "openai-batch": OpenAIFormat,
}
"""File formats without options, keyed by the value of ``input.format``."""
_TEXT_FORMATS: Mapping[str, Callable[[TextOptions], Format]] = {
    "jsonl": JsonlFormat,
    "json": JsonFormat,
    "csv": CsvFormat,
}
"""Text formats, keyed by the value of ``input.format``."""
_FORMATS_OF: Mapping[str, Sequence[str]] = {
    "delimiter": ("csv",),
    "json_field": ("json",),
    "encoding_errors": (*_TEXT_FORMATS, "parquet", "arrow", *TABLES),
}
"""Formats that support an option, keyed by the option's name. All text formats support the options
that are not listed here.
"""

_Piece = TypeVar("_Piece", pa.RecordBatch, list[Row])
_Pieces = Iterator[tuple[int, _Piece]]


@dataclass(frozen=True)
class Source:
    """The files of a dataset, and the rows that the job selects from them."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: int
    """Number of selected rows: at most ``limit`` rows that meet ``filter``."""
    format: Format
    file_columns: Mapping[str, FileColumns] = field(default_factory=dict)
    selection: RowIds | None = None
    """Row ids of the selected rows. None selects the first ``num_rows`` rows."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """Columns whose types differ between files. ``schema`` includes these columns, but their values
    cannot be read."""
    version: int | None = None
    """Version of the Delta or Iceberg table; None if the files do not form a table."""
    bad_ids: BadIds | None = None
    """Rows with a missing or duplicate id; None if the ids were not checked."""
    knows_columns: bool = True
    """False if the files are JSON without rows, which name no columns."""

    @property
    def rows_there(self) -> range:
        """Smallest range, starting at row 0, that is known to contain all selected rows."""
        if self.selection is None:
            return range(self.num_rows)
        return range(sum(file.num_rows for file in self.files))

    def count(self, rows: range) -> int:
        return len(rows) if self.selection is None else len(in_range(self.selection, rows))

    def row_ids(self, rows: range) -> RowIds:
        if self.selection is None:
            return np.arange(rows.start, rows.stop)
        return in_range(self.selection, rows)

    def bounds(self, rows_per_part: int) -> tuple[int, ...] | None:
        """Return the first row id of each part, followed by the last selected row id plus 1; None
        if the job has no filter."""
        if self.selection is None:
            return None
        if not len(self.selection):
            return 0, 0
        return *self.selection[::rows_per_part].tolist(), int(self.selection[-1]) + 1

    def with_columns(self, names: Iterable[str]) -> Source:
        """Return the dataset with the columns ``names``, as text, if its files name no columns."""
        if self.knows_columns:
            return self
        schema = self.schema
        for name in dict.fromkeys(names):
            if name not in schema.names:
                schema = schema.append(pa.field(name, pa.string()))
        return replace(self, schema=schema)

    def require(self, columns: Iterable[str], key: str) -> None:
        """Raise DataError, naming the job-file key ``key``, if one of ``columns`` is missing."""
        for name in columns:
            if name not in self.schema.names:
                raise DataError(
                    f"{key}: {self.files[0].path} has no column {format_value(name)}"
                    + near_name(name, self.schema.names),
                    hint=printable(f"its columns are: {listed(self.schema.names)}"),
                )

    def require_alike(self, columns: Iterable[str], *, only_kept: bool = False) -> None:
        """Check that all files have ``columns`` with types that can be read together.

        Args:
            only_kept: True if the job uses the columns only in ``input.keep_columns``.

        Raises:
            DataError: a column differs between two files, which the message names.
        """
        for name in columns:
            if name in self.differences:
                raise self.differences[name].error(only_kept=only_kept)

    def check_unchanged(self) -> None:
        """Raise DataError if a file was changed or removed after it was opened."""
        for file in self.files:
            try:
                check_unchanged(file)
            except OSError as error:
                raise DataError(
                    f"{file.path} can no longer be read: {error.strerror or error}",
                    hint="restore the file, then run again; finished rows are kept",
                ) from None

    def scan(
        self, columns: Sequence[str], ranges: Iterable[range]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read ``columns`` of the selected rows in ``ranges``, in one pass over the files.

        Args:
            columns: names of top-level columns; batches have them in this order.
            ranges: row ids to read, ascending and disjoint.

        Yields:
            The row id of the batch's first row, and the batch. A batch holds at most
            ``BATCH_ROWS`` consecutive rows of one range.

        Raises:
            DataError: a file cannot be read; the message names the file and, if known, the row
                group, record batch or line.
        """
        return self._read(self.format.batches, columns, ranges)

    def rows(self, columns: Sequence[str], ranges: Iterable[range]) -> Iterator[Rows]:
        """Read ``columns`` of the rows in ``ranges`` as Python values, in one pass over the files.

        Texts are ``str`` or UTF-8 bytes. Values and rows that cannot be read, and the rows in
        ``bad_ids``, are replaced with a ``RowError``.
        """
        pieces = self._read(self.format.rows, columns, ranges)
        return pieces if self.bad_ids is None else map(self.bad_ids.mark, pieces)

    def batches(
        self, columns: Sequence[str], parts: Sequence[Part], ranges: Iterable[range] | None = None
    ) -> Iterator[tuple[list[int], list[Row]]]:
        """Read rows as ``rows`` does, but in full batches even if the rows are scattered.

        Args:
            parts: the parts that contain the rows, in order.
            ranges: row ids to read, in order, each range within one part; None reads all parts.

        Yields:
            Row ids and rows. All rows of a batch belong to one part. A batch has ``BATCH_ROWS``
            rows or a few more; the last batch of a part may have fewer.
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
        """Split a batch into runs of selected rows, each with the id of its first row."""
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
    options: TextOptions = DEFAULT_OPTIONS,
) -> Source:
    """Find the files of ``path`` and check that they can be read together.

    Args:
        path: a file, a glob, a directory, or a list of these, local or in an object store. In a
            directory, only files with the suffixes of data files are read, and folders named
            key=value add columns.
        limit: maximum number of rows to select after the filter; None selects all.
        format_name: ``input.format``.
        condition: ``input.filter``. The files are read once to find the rows that meet it.
        mode: ``input.schema``.
        version: version of a Delta or Iceberg table; None for the latest.
        options: how to read text files.

    Raises:
        DataError: no file was found, a file cannot be read, or files differ in the columns that
            the condition reads.
        StorageError: an object store does not answer.
        UsageError: the file names belong to two formats, the condition is invalid, or the format
            does not support one of the options.
    """
    paths = [path] if isinstance(path, str) else path
    kind = table_format(paths, format_name)
    if kind is not None:
        _refuse_options(options, kind)
        table = open_table(paths[0], kind, version)
        whole = _open_files(_format("parquet", options), table.partitions, "union", table.schema)
        return _select(replace(whole, version=table.version), limit, condition)
    if version is not None:
        raise UsageError(
            "input.version: only tables (delta or iceberg) have versions; leave it out"
        )
    names = find_files(path, format_name)
    chosen = _format(named_format(names) if format_name == "auto" else format_name, options)
    folders = folder_values(paths, names)
    if chosen.holds_requests:  # request files have fixed columns
        folders = {name: {} for name in names}
    return _select(_open_files(chosen, folders, mode), limit, condition)


def _format(name: str, options: TextOptions) -> Format:
    _refuse_options(options, name)
    if name in _TEXT_FORMATS:
        return _TEXT_FORMATS[name](options)
    chosen = _FORMATS[name]()
    chosen.replaces_bad_text = options.encoding_errors == "replace"
    return chosen


def _refuse_options(options: TextOptions, name: str) -> None:
    for key in options.used():
        formats = _FORMATS_OF.get(key, _TEXT_FORMATS)
        if name not in formats:
            raise UsageError(
                f"input.{key} is only for the formats {listed(formats)}, and the input's format is "
                f"{name}; leave it out"
            )


def _open_files(
    chosen: Format,
    folders: Mapping[str, Values],
    mode: SchemaMode,
    table_schema: pa.Schema | None = None,
) -> Source:
    """Open files as one dataset with all of their rows selected.

    Args:
        folders: columns and values from folder names, keyed by the file's path.
        table_schema: schema of the dataset; None derives it from the files.
    """
    files: list[InputFile] = []
    schemas: dict[str, pa.Schema] = {}
    before = pa.schema([])
    for path, values in folders.items():
        file, file_schema = chosen.inspect(path)
        file_schema = file_schema.remove_metadata()
        before = schemas[path] = (
            before if before.equals(file_schema, check_metadata=True) else file_schema
        )
        partition = {name: value for name, value in values.items() if name not in file_schema.names}
        files.append(replace(file, partition=partition))
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
    knows_columns = num_rows > 0 or chosen.holds_requests or not isinstance(chosen, JsonlFormat)
    return Source(
        *(tuple(files), schema, num_rows, chosen, columns),
        differences=differences,
        knows_columns=knows_columns,
    )


def _select(whole: Source, limit: int | None, condition: str | None) -> Source:
    has_types = whole.num_rows > 0 or not isinstance(whole.format, TextFormat)
    if condition is None or not has_types:
        total = whole.num_rows
        return replace(whole, num_rows=total if limit is None else min(total, limit))
    meets = Condition(condition, whole.schema)
    whole.require_alike(meets.columns)
    selection = select_rows(meets, whole.scan(meets.columns, [whole.rows_there]), limit)
    return replace(whole, num_rows=len(selection), selection=selection)
