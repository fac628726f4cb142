"""JSON Lines as input: an object a line, its keys the columns, however long or damaged the lines.

A file is read once when it is opened, to count its rows and find the types of columns. Blank lines
are not rows. A line that does not hold an object becomes an error row; only a file without a single
object is refused, for it is of another kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic_core import from_json, to_json

from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import REWRITE, SAMPLING_COLUMN, InputFile, ReadRequest, Row, Rows
from batchinfer.job.input.formats.text_file import MARK, TextFormat, batched
from batchinfer.job.input.json_columns import ColumnTypes, column, json_text
from batchinfer.job.input.union import Difference, SchemaMode

Line = tuple[int, bytes]
"""Its number in the file, from 1, and its bytes without the newline."""

MAX_LINE_BYTES = 64 << 20
"""A longer line is not read; a row's longest text may take as much."""
_KINDS: dict[type, str] = {
    **{str: "a string", list: "an array", type(None): "null"},
    **{bool: "true or false", int: "a number", float: "a number"},
}
_PLACE = re.compile(r" at line 1 column (\d+)$")
_MOST_COLUMNS = 10_000


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """Lines that are not blank, each cut one byte after ``MAX_LINE_BYTES``."""
    number, rest = 1, b""
    for chunk in chunks:
        start, *others = chunk.split(b"\n")
        rest = (rest + start)[: MAX_LINE_BYTES + 1]
        for line in others:
            if rest and not rest.isspace():
                yield number, rest.removeprefix(MARK) if number == 1 else rest
            number, rest = number + 1, line
    if rest and not rest.isspace():
        yield number, rest.removeprefix(MARK) if number == 1 else rest


def parse_object(line: Line, path: str) -> Row:
    """The JSON object of a line, or a ``RowError`` that names file and line.

    Error codes: ``invalid_json``, ``invalid_utf8``, ``row_too_large``.
    """
    number, text = line
    where = f"{path}, line {number}"
    if len(text) > MAX_LINE_BYTES:
        return RowError("row_too_large", f"{where} has over {MAX_LINE_BYTES} bytes")
    try:
        value = from_json(text, cache_strings="keys")
    except ValueError as error:
        reason = _PLACE.sub(r" at byte \1", str(error))
        code = "invalid_utf8" if reason.startswith("invalid unicode") else "invalid_json"
        return RowError(code, f"{where} is not JSON: {reason}")
    if not isinstance(value, dict):
        what = _KINDS[type(value)]
        return RowError("invalid_json", f"{where} is {what}; it must be an object")
    return value


class JsonlFormat(TextFormat[Line]):
    """JSON Lines, an object a line."""

    title = "JSON Lines"

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        types = ColumnTypes()

        def learn(rows: Sequence[Row]) -> None:
            types.add([row for row in rows if not isinstance(row, RowError)])
            if len(types) > _MOST_COLUMNS:
                raise DataError(
                    f"{path}: its objects have over {_MOST_COLUMNS} different keys; {REWRITE}"
                )

        return self.read_whole(path, learn), types.schema()

    def unite(
        self, schemas: Mapping[str, pa.Schema], mode: SchemaMode
    ) -> tuple[pa.Schema, Mapping[str, Difference]]:
        """The columns of all files; values without a common type are kept as JSON text."""
        types = ColumnTypes()
        for schema in schemas.values():
            types.add_schema(schema)
        # Rows choose different parameters: one type for all would be null for most.
        fields = [json_text(f.name) if f.name == SAMPLING_COLUMN else f for f in types.schema()]
        return pa.schema(fields), {}

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of columns, null in a row that cannot be read."""
        fields = [request.schema.field(name) for name in request.columns]
        fields = fields or [pa.field("", pa.null())]  # objects without keys are rows too
        for first, lines in self.wanted(request):
            rows = [self.kept(line, request.file.path) for line in lines]
            arrays = [column([row.get(f.name) for row in rows], f) for f in fields]
            yield first, pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def kept(self, line: Line, path: str) -> Mapping[str, Any]:
        """The columns of a line that go to the output."""
        (row,) = self.parsed([line], path)
        return {} if isinstance(row, RowError) else row

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Rows as Python values, None for keys that a row does not have."""
        constants = request.file_columns.constants
        for first, lines in self.wanted(request):
            rows = self.parsed(lines, request.file.path)
            yield first, [_with(row, request.columns, constants) for row in rows]

    def records(self, chunks: Iterable[bytes], path: str) -> Iterator[list[Line]]:
        """The lines that are rows."""
        return batched(split_lines(chunks), lambda line: len(line[1]))

    def parsed(self, records: Sequence[Line], path: str) -> list[Row]:
        """The objects of lines, or a ``RowError``."""
        return [parse_object(line, path) for line in records]


def _with(row: Row, columns: Sequence[str], constants: Mapping[str, Any]) -> Row:
    """A row with ``columns``, of its own or constant."""
    if isinstance(row, RowError):
        return row
    chosen = {name: constants[name] if name in constants else row.get(name) for name in columns}
    if isinstance(chosen.get(SAMPLING_COLUMN), dict):
        # As text: what is null in it may be part of a schema.
        chosen[SAMPLING_COLUMN] = to_json(chosen[SAMPLING_COLUMN])
    return chosen
