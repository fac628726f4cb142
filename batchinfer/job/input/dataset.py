"""The prompt dataset: files read in order as one table, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import TypeVar

import numpy as np
import pyarrow as pa

from batchinfer.console.format import format_value, listed, near_name, printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.discover import find_files, named_format
from batchinfer.job.input.filter import Condition, Selection, select_rows
from batchinfer.job.input.format import (
    BATCH_ROWS,
    Format,
    InputFile,
    ReadRequest,
    Row,
    Rows,
    check_unchanged,
)
from batchinfer.job.input.formats.table import open_table, table_format
from batchinfer.job.input.hive_partitions import HiveFormat, folder_values
from batchinfer.job.input.union import (
    Difference,
    SchemaMode,
    TypedFormat,
    UnitedFormat,
    same,
    widened,
)
from batchinfer.job.input.unique_ids import BadIds
from batchinfer.job.row_ids import Part, RowIds

_Piece = TypeVar("_Piece", pa.RecordBatch, list[Row])
_Found = Iterator[tuple[int, _Piece]]
_Read = Callable[[ReadRequest], _Found[_Piece]]


@dataclass(frozen=True)
class Source:
    """The files of a dataset, read one after the other."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: int
    """Rows selected: all, those that meet ``filter``, and of these ``limit``."""
    format: Format
    selection: Selection | None = None
    """The rows selected; None: the first ones."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """Columns that differ from file to file: they are in ``schema`` and cannot be read."""
    version: int | None = None
    """Of a table; None: the files are no table's."""
    bad_ids: BadIds | None = None
    """Rows that are errors for their ids; None: ids do not matter, or are not looked at yet."""

    @property
    def rows_there(self) -> range:
        """Row ids from the first selected row to the last, or more."""
        if self.selection is None:
            return range(self.num_rows)
        return range(sum(file.num_rows for file in self.files))

    def count(self, rows: range) -> int:
        """How many of the rows in ``rows`` are selected."""
        return len(rows) if self.selection is None else self.selection.count(rows)

    def row_ids(self, rows: range) -> RowIds:
        """Those of the rows in ``rows`` that are selected."""
        if self.selection is None:
            return np.arange(rows.start, rows.stop)
        return self.selection.within(rows)

    def bounds(self, rows_per_part: int) -> tuple[int, ...] | None:
        """The first row id of each part, and where the last one ends; None without a filter."""
        return None if self.selection is None else self.selection.bounds(rows_per_part)

    def require(self, columns: Iterable[str], key: str) -> None:
        """Check that the dataset has ``columns``, which ``key`` of the job file asks for.

        Raises:
            DataError: naming the missing column and the columns there are.
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
            only_kept: they are of use for ``input.keep_columns`` alone.

        Raises:
            DataError: one differs; shows two files.
        """
        for name in columns:
            if name in self.differences:
                raise self.differences[name].error(only_kept=only_kept)

    def check_unchanged(self) -> None:
        """Check that every file is still the one that was opened.

        Raises:
            DataError: one was written again, or is gone.
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
            ranges: row ids to read, ascending and disjoint; those not selected are left out.

        Yields:
            The row id of a batch's first row, and the batch: at most ``BATCH_ROWS`` rows, all
            of one range, that follow each other.

        Raises:
            DataError: naming the file and the place in it that cannot be read.
        """
        return self._read(self.format.scan, columns, ranges)

    def rows(self, columns: Sequence[str], ranges: Iterable[range]) -> Iterator[Rows]:
        """Read ``columns`` of the rows in ``ranges`` as Python's values, once through the files.

        Texts are ``str`` or UTF-8 bytes; a value or a row that cannot be read is a ``RowError``, as
        is a row of ``bad_ids``.
        """
        pieces = self._read(self.format.rows, columns, ranges)
        return pieces if self.bad_ids is None else map(self.bad_ids.mark, pieces)

    def batches(
        self, columns: Sequence[str], parts: Sequence[Part], ranges: Iterable[range] | None = None
    ) -> Iterator[tuple[list[int], list[Row]]]:
        """Read rows as ``rows`` does, in batches of one part's, however scattered they are.

        Args:
            parts: parts that hold the rows, in order.
            ranges: only these rows, in order, each range in one part; None: all of the parts.

        Yields:
            Row ids and rows: ``BATCH_ROWS`` or a few more, or all that are left of a part.
        """
        ranges = [part.rows for part in parts] if ranges is None else list(ranges)
        first_rows = [part.rows.start for part in parts]
        pieces = self.rows(columns, ranges)
        for _, of_part in groupby(ranges, key=lambda rows: bisect_right(first_rows, rows.start)):
            missing = sum(map(self.count, of_part))
            while missing:
                row_ids, rows = _taken(pieces, min(missing, BATCH_ROWS))
                missing -= len(rows)
                yield row_ids, rows

    def _read(
        self, read: _Read[_Piece], columns: Sequence[str], ranges: Iterable[range]
    ) -> _Found[_Piece]:
        selection = self.selection
        chosen = ranges if selection is None else selection.near(ranges)
        wanted = deque(rows for rows in chosen if len(rows))
        first_rows = accumulate((file.num_rows for file in self.files), initial=0)
        for file, first_row in zip(self.files, first_rows, strict=False):
            if not wanted:
                return
            if wanted[0].start < first_row + file.num_rows:
                request = ReadRequest(file, first_row, columns, self.schema, wanted)
                for first, piece in read(request):
                    if selection is None:
                        yield first, piece
                    else:
                        yield from selection.of_piece(first, piece)


def _taken(pieces: Iterator[Rows], num_rows: int) -> tuple[list[int], list[Row]]:
    """Row ids and rows of the next pieces that come to ``num_rows`` or more."""
    row_ids: list[int] = []
    rows: list[Row] = []
    while len(rows) < num_rows:
        first_row, piece = next(pieces)
        row_ids.extend(range(first_row, first_row + len(piece)))
        rows.extend(piece)
    return row_ids, rows


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
        path: a file, a glob, a directory (searched for names that data has), or a list of these,
            local or in an object store. Folders in it that are named key=value are columns.
        limit: use only this many rows, of those that meet the condition.
        format_name: ``input.format``.
        condition: ``input.filter``; the rows that meet it are found at once.
        mode: ``input.schema``.
        version: of a table; None: the latest.

    Raises:
        DataError: no file, a file that is not readable, or files that do not go together in what
            the condition reads.
        StorageError: an object store does not answer.
        UsageError: ``auto``, and files are named for two formats; a condition that is wrong.
    """
    paths = [path] if isinstance(path, str) else path
    table = table_format(paths, format_name)
    if table is not None:
        snapshot = open_table(paths[0], table, version)
        whole = _open_files(snapshot.files, snapshot.format(), {})
        return _selected(replace(whole, version=snapshot.version), limit, condition)
    if version is not None:
        raise UsageError("input.version: only tables (delta, iceberg) have versions")
    names = find_files(path, format_name)
    chosen = _format(named_format(names) if format_name == "auto" else format_name, mode)
    differences = chosen.differences if isinstance(chosen, UnitedFormat) else {}
    folders = folder_values(paths, names)
    if any(folders.values()) and not chosen.holds_requests:
        chosen = HiveFormat(chosen, folders)
    return _selected(_open_files(names, chosen, differences), limit, condition)


def _open_files(
    names: Sequence[str], chosen: Format, differences: Mapping[str, Difference]
) -> Source:
    """All rows of some files."""
    found = [chosen.inspect(name) for name in names]
    files = tuple(file for file, _ in found)
    schema = chosen.common_schema(files, [schema for _, schema in found])
    total = sum(file.num_rows for file in files)
    return Source(files, schema, total, chosen, differences=differences)


def _selected(whole: Source, limit: int | None, condition: str | None) -> Source:
    """The rows that meet a condition, and of these the first ones."""
    if condition is None:
        total = whole.num_rows
        return replace(whole, num_rows=total if limit is None else min(total, limit))
    meets = Condition(condition, whole.schema)
    whole.require_alike(meets.columns)
    selection = select_rows(meets, whole.scan(meets.columns, [whole.rows_there]), limit)
    return replace(whole, num_rows=len(selection), selection=selection)


def _format(name: str, mode: SchemaMode) -> Format:
    if name == "jsonl":
        from batchinfer.job.input.jsonl import JsonlFormat

        return JsonlFormat()
    if name == "csv":
        from batchinfer.job.input.formats.csv import CsvFormat

        return CsvFormat(mode)
    if name == "openai-batch":
        from batchinfer.job.input.openai_batch import OpenAIFormat

        return OpenAIFormat()
    return UnitedFormat(_typed_format(name), mode, widened if mode == "union" else same)


def _typed_format(name: str) -> TypedFormat:
    if name == "arrow":
        from batchinfer.job.input.formats.arrow_ipc import ArrowFormat

        return ArrowFormat()
    from batchinfer.job.input.parquet import ParquetFormat

    return ParquetFormat()
