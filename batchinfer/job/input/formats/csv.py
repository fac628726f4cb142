"""Reads CSV files (RFC 4180) with a header.

A column is int64 or double only if all files write every value as Python would write it, so that a
template shows each value exactly as it is in the file. Every other column is text, for example a
column with 007 or 1.10. Python's ``csv`` splits a file into records, because that module knows each
record's line number and can continue after an invalid record.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchinfer.console.format import format_value, printable
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import REWRITE, SAMPLING_COLUMN, InputFile, ReadRequest, Row, Rows
from batchinfer.job.input.formats.encoding import MARK, BadCell, is_utf8, lines_before_error
from batchinfer.job.input.formats.options import DEFAULT_OPTIONS, TextOptions
from batchinfer.job.input.formats.text_file import TextFormat, batched
from batchinfer.job.input.unify_schemas import Difference, SchemaMode, united

MAX_CELL_BYTES = 64 << 20
"""Maximum size of a cell. A row with a larger cell is an error, because the parser needs four bytes
of memory for each byte of a cell.
"""
_BYTES = "latin-1"  # maps each byte to a character and back without loss
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?")
_HAS_TABS = re.compile(r"\.tsv(\.(gz|zst|bz2))?$")
DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that files commonly use."""

csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL_BYTES))

Record = list[str] | RowError
"""The cells of a row as Latin-1 strings, one character per byte; or the row's error."""


def _is_float(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None and repr(float(cell)) == cell


_CAN_BE: Mapping[pa.DataType, Callable[[str], object]] = {
    pa.int64(): _INTEGER.fullmatch,
    pa.float64(): _is_float,
}
"""For each type, a function that tests whether a cell is written as Python writes such a value."""


def merged(kinds: Collection[pa.DataType]) -> pa.DataType:
    """Merge the types of a column: different types become text, which keeps values as written."""
    known = {kind for kind in kinds if not pa.types.is_null(kind)}
    return known.pop() if len(known) == 1 else pa.string()


class _ColumnTypes:
    """Finds types that reproduce all cells of a column as written. Empty cells fit every type."""

    def __init__(self) -> None:
        self._possible: dict[int, list[pa.DataType]] = {}
        """Possible types of each column that has a non-empty cell, keyed by the column's index."""

    def add(self, records: Sequence[Record]) -> None:
        cells = [record for record in records if not isinstance(record, RowError)]
        for at, column in enumerate(zip(*cells, strict=True)):
            if any(column):
                kinds = self._possible.get(at, list(_CAN_BE))
                fits = [k for k in kinds if all(map(_CAN_BE[k], filter(None, column)))]
                self._possible[at] = fits

    def of(self, at: int) -> pa.DataType:
        """Return the type of a column; null if all of its cells are empty."""
        return next(iter([*self._possible[at], pa.string()])) if at in self._possible else pa.null()


class CsvFormat(TextFormat[Record]):
    """CSV files. Without ``delimiter``, cells are separated by tabs in files named ``.tsv``, and by
    commas in all other files.

    An empty cell is null in the output and an empty string in a prompt.
    """

    title = "CSV"

    def __init__(self, options: TextOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(options)
        self._names: dict[str, list[str]] = {}
        """Column names, keyed by the file's path."""

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        types = _ColumnTypes()
        file = self.read_whole(path, types.add)
        return file, pa.schema([(name, types.of(at)) for at, name in enumerate(self._names[path])])

    def unite(
        self, schemas: Mapping[str, pa.Schema], mode: SchemaMode
    ) -> tuple[pa.Schema, Mapping[str, Difference]]:
        return united(schemas, mode, merged)

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read batches of columns with the dataset's types; invalid records are null."""
        names = self._names[request.file.path]
        schema = pa.schema([request.schema.field(name) for name in request.columns])
        for first, records in self.wanted(request):
            arrays = [_column(records, names.index(field.name), field.type) for field in schema]
            yield first, pa.RecordBatch.from_arrays(arrays, schema=schema)

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Read rows as Python values, with bytes for text and errors for bad records."""
        names = self._names[request.file.path]
        empty = {**dict.fromkeys(request.columns), **request.file_columns.constants}
        read = [
            (name, names.index(name), request.schema.field(name).type)
            for name in request.columns
            if name in names
        ]
        for first, records in self.wanted(request):
            rows: list[Row] = []
            for cells in records:
                if isinstance(cells, RowError):
                    rows.append(cells)
                else:
                    rows.append(
                        empty | {name: _shown(name, cells[at], kind) for name, at, kind in read}
                    )
            yield first, rows

    def records(self, chunks: Iterable[bytes], path: str) -> Iterator[list[Record]]:
        """Read the header, which names the columns, and yield the records after it."""
        delimiter = self._delimiter(path)
        records = read_records(chunks, path, delimiter)
        names = self._names[path] = _header(next(records, None), path, delimiter)
        checked = (_checked(record, line, len(names), path) for line, record in records)
        return batched(checked, lambda r: 0 if isinstance(r, RowError) else sum(map(len, r)))

    def bad_cells(self, chunks: Iterable[bytes], path: str) -> Iterator[BadCell]:
        names: list[str] | None = None
        for line, record in read_records(chunks, path, self._delimiter(path)):
            if isinstance(record, RowError):
                continue
            texts = [cell.encode(_BYTES) for cell in record]
            if names is None:
                names = [text.decode(errors="replace") for text in texts]
            columns = names if len(texts) == len(names) else [None] * len(texts)
            for at, (column, text) in enumerate(zip(columns, texts, strict=True)):
                if not is_utf8(text):
                    lines = lines_before_error(b",".join(texts[: at + 1]))
                    yield BadCell(line + lines, column, text)

    def parsed(self, records: list[Record], path: str) -> list[Record]:
        return records

    def _delimiter(self, path: str) -> str:
        return self.options.delimiter or default_delimiter(path)


def default_delimiter(path: str) -> str:
    """Return the delimiter of a file with this name: a tab or a comma."""
    return "\t" if _HAS_TABS.search(path) else ","


def _column(records: Sequence[Record], at: int, kind: pa.DataType) -> pa.Array:
    values = [None if isinstance(r, RowError) else _value(r[at], kind) for r in records]
    if pa.types.is_string(kind):
        return pa.array(values, pa.binary()).view(kind)
    return pa.array(values, kind)


def _shown(name: str, cell: str, kind: pa.DataType) -> Any:
    return _value(cell, kind) if cell or name == SAMPLING_COLUMN else b""


def _value(cell: str, kind: pa.DataType) -> Any:
    """Convert a cell to its value; text becomes bytes, because it may be invalid UTF-8."""
    if not cell:
        return None
    if pa.types.is_string(kind):
        return cell.encode(_BYTES)
    return int(cell) if pa.types.is_integer(kind) else float(cell)


def _checked(record: Record, line: int, width: int, path: str) -> Record:
    """Replace a record with an error if its number of cells differs from the header's."""
    if isinstance(record, RowError) or len(record) == width:
        return record
    where = f"{path}, line {line} has {len(record)} cells"
    return RowError("invalid_csv", f"{where}, but its header has {width}")


def read_records(
    chunks: Iterable[bytes], path: str, delimiter: str
) -> Iterator[tuple[int, Record]]:
    """Yield all records, including the header, each with the number of its first line, from 1.
    Raise DataError if a quote is never closed."""
    lines = _CountedQuotes(_lines(chunks, path))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = lines.begin_record()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, _wrong_record(error, f"{path}, line {line}", lines)
            continue
        if cells:
            yield line, cells


class _CountedQuotes(Iterator[str]):
    """Iterates over lines, and tracks whether the current record has an open quote."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._num_lines = 0
        self._is_open = False

    def __next__(self) -> str:
        line = next(self._lines)
        self._num_lines += 1
        self._is_open ^= line.count('"') % 2 > 0
        return line

    def begin_record(self) -> int:
        """Begin a record and return the number of its first line, from 1."""
        self._is_open = False
        return self._num_lines + 1

    def end_record(self) -> bool:
        """Skip the rest of the record; return True if its quotes were closed."""
        while self._is_open and next(self, None) is not None:
            pass
        return not self._is_open


def _wrong_record(error: csv.Error, where: str, lines: _CountedQuotes) -> RowError:
    """Make the error for one invalid record; the next line begins a new record. Raise DataError if
    a quote is never closed, so that no later record can be found."""
    text = str(error)
    is_too_large = "field limit" in text
    if "unexpected end" in text or (is_too_large and not lines.end_record()):
        raise DataError(
            f"{where}: a quote is never closed",
            hint="close the quote; a quote inside a quoted cell must be written twice",
        )
    if is_too_large:
        message = f"{where}: a cell has more than {MAX_CELL_BYTES >> 20} MiB"
        return RowError("row_too_large", message)
    return RowError("invalid_csv", f"{where}: {printable(text, 120)}")


def _lines(chunks: Iterable[bytes], path: str) -> Iterator[str]:
    """Yield lines with their line endings (LF, CRLF or CR) as Latin-1, one character per byte."""
    rest, begun = b"", False
    for chunk in chunks:
        if not begun:
            chunk, begun = chunk.removeprefix(MARK), True
        *whole, rest = (rest + chunk).splitlines(keepends=True) or [b""]
        if rest.endswith(b"\n"):
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(_BYTES)
        if len(rest) > 4 * MAX_CELL_BYTES:
            raise DataError(
                f"{path} has a line of more than {4 * MAX_CELL_BYTES >> 20} MiB", hint=REWRITE
            )
    if rest:
        yield rest.decode(_BYTES)


def _header(record: tuple[int, Record] | None, path: str, delimiter: str) -> list[str]:
    """Read the column names; a column with an empty name is called ``column0``, ``column1`` ..."""
    if record is None:
        raise DataError(f"{path} is empty and has no header", hint=REWRITE)
    line, cells = record
    if isinstance(cells, RowError):
        raise DataError(cells.message, hint=REWRITE)
    raw = [cell.encode(_BYTES) for cell in cells]
    names = [name.decode().strip() or f"column{at}" for at, name in enumerate(raw)]
    if any("\0" in name for name in names):
        raise DataError(
            f"{path}, line {line} is not a header, because it contains a NUL character",
            hint=REWRITE,
        )
    other = next((mark for mark in DELIMITERS if mark in names[0]), None)
    if len(names) == 1 and other is not None:
        raise DataError(
            f"{path}: the header has no {format_value(delimiter)}: {printable(names[0], 60)}",
            hint=f"set input.delimiter: {format_value(other)}",
        )
    return names
