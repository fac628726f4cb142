"""Reads JSON Lines files: one object per line, whose keys are the columns.

A file is read once when it is opened, to count its rows and find the types of its columns. Blank
lines are not rows. A line that does not hold an object becomes an error row. A file without a
single object is refused, because it is probably not JSON Lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic_core import from_json, to_json

from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import REWRITE, SAMPLING_COLUMN, InputFile, ReadRequest, Row, Rows
from batchinfer.job.input.formats.encoding import MARK, BadCell, is_utf8
from batchinfer.job.input.formats.json_values import MAX_DEPTH
from batchinfer.job.input.formats.text_file import TextFormat, batched
from batchinfer.job.input.json_columns import ColumnTypes, column, json_text
from batchinfer.job.input.unify_schemas import Difference, SchemaMode

Line = tuple[int, bytes]
"""A line's number in the file, from 1, and its bytes without the newline."""

MAX_LINE_BYTES = 64 << 20
"""Maximum size of a line, which also limits a row's text."""
_KINDS: dict[type, str] = {
    **{str: "a string", list: "an array", type(None): "null"},
    **{bool: "true or false", int: "a number", float: "a number"},
}
_PLACE = re.compile(r" at line 1 column (\d+)$")
_HALF = "it has half of a surrogate pair"
_UNREADABLE = {
    "recursion limit exceeded": f"its values are nested in more than {MAX_DEPTH} levels",
    "lone leading surrogate in hex escape": _HALF,
    "unexpected end of hex escape": _HALF,
}
"""The parser's errors about valid JSON that it cannot read, each in words for users."""
_ESCAPED = re.compile("[\udc80-\udcff]")
"""Characters to which ``surrogateescape`` maps bytes that are not valid UTF-8."""
_MOST_COLUMNS = 10_000


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """Split chunks into lines; drop blank lines and cut lines to ``MAX_LINE_BYTES`` + 1 bytes."""
    number, rest = 1, b""
    for chunk in chunks:
        start, *following = chunk.split(b"\n")
        rest = (rest + start)[: MAX_LINE_BYTES + 1]
        for line in following:
            if rest and not rest.isspace():
                yield number, rest.removeprefix(MARK) if number == 1 else rest
            number, rest = number + 1, line
    if rest and not rest.isspace():
        yield number, rest.removeprefix(MARK) if number == 1 else rest


def parse_object(line: Line, path: str) -> Row:
    """Parse the JSON object of a line; return a ``RowError`` with file and line if it is invalid.

    Error codes: ``invalid_json``, ``invalid_utf8``, ``row_too_large``.
    """
    number, text = line
    where = f"{path}, line {number}"
    if len(text) > MAX_LINE_BYTES:
        return RowError("row_too_large", f"{where} has more than {MAX_LINE_BYTES} bytes")
    try:
        value = from_json(text, cache_strings="keys")
    except ValueError as error:
        reason, place = _PLACE.sub("", str(error)), _PLACE.search(str(error))
        at = "" if place is None else f" at byte {place[1]}"
        if reason in _UNREADABLE:
            return RowError("invalid_json", f"{where} cannot be read: {_UNREADABLE[reason]}{at}")
        code = "invalid_utf8" if reason.startswith("invalid unicode") else "invalid_json"
        return RowError(code, f"{where} is not JSON: {reason}{at}")
    if not isinstance(value, dict):
        what = _KINDS[type(value)]
        return RowError("invalid_json", f"{where} is {what}; it must be a JSON object")
    return value


class JsonlFormat(TextFormat[Line]):
    title = "JSON Lines"

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        types = ColumnTypes()

        def learn(rows: Sequence[Row]) -> None:
            types.add([row for row in rows if not isinstance(row, RowError)])
            if len(types) > _MOST_COLUMNS:
                raise DataError(
                    f"{path}: its objects have more than {_MOST_COLUMNS} different keys; {REWRITE}"
                )

        return self.read_whole(path, learn), types.schema()

    def unite(
        self, schemas: Mapping[str, pa.Schema], mode: SchemaMode
    ) -> tuple[pa.Schema, Mapping[str, Difference]]:
        """Merge the columns of all files; columns without a common type become JSON text."""
        types = ColumnTypes()
        for schema in schemas.values():
            types.add_schema(schema)
        # Rows set different parameters, so most fields of a common struct would be null.
        fields = [json_text(f.name) if f.name == SAMPLING_COLUMN else f for f in types.schema()]
        return pa.schema(fields), {}

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read batches of columns; all columns of an unreadable row are null."""
        fields = [request.schema.field(name) for name in request.columns]
        fields = fields or [pa.field("", pa.null())]  # objects without keys are also rows
        for first, lines in self.wanted(request):
            rows = [self.kept(line, request.file.path) for line in lines]
            arrays = [column([row.get(f.name) for row in rows], f) for f in fields]
            yield first, pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def kept(self, line: Line, path: str) -> Mapping[str, Any]:
        """Return the values of a line that are copied to the output."""
        (row,) = self.parsed([line], path)
        return {} if isinstance(row, RowError) else row

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Read rows as Python values, with None for missing keys."""
        constants = request.file_columns.constants
        for first, lines in self.wanted(request):
            rows = self.parsed(lines, request.file.path)
            yield first, [_with(row, request.columns, constants) for row in rows]

    def lines(self, chunks: Iterable[bytes], path: str) -> Iterator[Line]:
        return split_lines(chunks)

    def records(self, chunks: Iterable[bytes], path: str) -> Iterator[list[Line]]:
        return batched(self.lines(chunks, path), lambda line: len(line[1]))

    def bad_cells(self, chunks: Iterable[bytes], path: str) -> Iterator[BadCell]:
        for number, text in self.lines(chunks, path):
            if len(text) <= MAX_LINE_BYTES and not is_utf8(text):
                for column in _bad_columns(text) or [None]:
                    yield BadCell(number, column, text)

    def parsed(self, records: Sequence[Line], path: str) -> list[Row]:
        """Parse lines to objects; an invalid line becomes a ``RowError``."""
        return [parse_object(line, path) for line in records]


def _bad_columns(line: bytes) -> list[str | None]:
    """Return the keys of a line's object that hold bytes that are not valid UTF-8; an empty list
    if the line is not an object."""
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except ValueError:
        return []
    cells = row.items() if isinstance(row, dict) else ()
    texts = ((name, name + json.dumps(value, ensure_ascii=False)) for name, value in cells)
    return [_ESCAPED.sub("\ufffd", name) for name, text in texts if _ESCAPED.search(text)]


def _with(row: Row, columns: Sequence[str], constants: Mapping[str, Any]) -> Row:
    if isinstance(row, RowError):
        return row
    chosen = {name: constants[name] if name in constants else row.get(name) for name in columns}
    if isinstance(chosen.get(SAMPLING_COLUMN), dict):
        # Write parameters as text to keep nulls, which may be part of a JSON schema.
        chosen[SAMPLING_COLUMN] = to_json(chosen[SAMPLING_COLUMN])
    return chosen
