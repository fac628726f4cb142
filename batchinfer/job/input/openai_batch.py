"""OpenAI batch files as input: a request a line, each with an id that no earlier one has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic_core import from_json

from batchinfer.console.format import format_value
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import InputFile, ReadRequest, Row, Rows
from batchinfer.job.input.json_columns import json_text
from batchinfer.job.input.jsonl import JsonlFormat, Line, wanted_lines

_BYTES = 16

SCHEMA = pa.schema(
    [*((name, pa.string()) for name in ("custom_id", "method", "url")), json_text("body")]
)
_TEXTS = ("custom_id", "method", "url")


class CustomIds:
    """Ids of requests, in order, of which a hash without collisions is kept, 16 bytes each."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, ids: Sequence[Any]) -> None:
        """Take the ids of the next requests; what is no text is equal to no other."""
        for value in ids:
            row = len(self._digests) // _BYTES
            text = f"id {value}" if isinstance(value, str) else f"row {row}"
            self._digests += hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()

    def is_repeated(self, row: int) -> bool:
        """Whether an earlier request than ``row`` has its id; all were added before."""
        at = int(np.searchsorted(self._repeated, row))
        return at < len(self._repeated) and int(self._repeated[at]) == row

    @cached_property
    def _repeated(self) -> npt.NDArray[np.int64]:
        digests = np.frombuffer(bytes(self._digests), dtype=[("a", "<u8"), ("b", "<u8")])
        order = np.argsort(digests, order=("a", "b"), kind="stable")
        same = digests[order][1:] == digests[order][:-1]
        return np.sort(order[1:][same])


class OpenAIFormat(JsonlFormat):
    """OpenAI batch files, with the columns of ``SCHEMA``.

    A line whose ``custom_id`` an earlier one has is an error row, whichever file that is in.
    """

    holds_requests = True

    def __init__(self) -> None:
        self._ids = CustomIds()

    def see(self, first_row: int, rows: Sequence[Row]) -> None:
        """Remember the ids of requests."""
        self._ids.add([None if isinstance(row, RowError) else row.get("custom_id") for row in rows])

    def common_schema(self, files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
        """``SCHEMA``, whatever the files hold."""
        if not any(file.num_rows for file in files):
            raise DataError(f"{files[0].path} holds no requests: it has no line that is not blank")
        return SCHEMA

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Rows with all that is in their lines, whatever columns are asked for."""
        for first, lines in wanted_lines(request):
            rows = enumerate(self.parsed(lines, request.file.path), first)
            yield first, [_repeated(row) if self._is_repeated(at, row) else row for at, row in rows]

    def _is_repeated(self, at: int, row: Row) -> bool:
        return not isinstance(row, RowError) and self._ids.is_repeated(at)

    def kept(self, line: Line, path: str) -> Mapping[str, Any]:
        """The columns that go to the output; of a damaged line, as far as they can be read."""
        row = _beginning(line[1])
        texts = {name: _text(row.get(name)) for name in _TEXTS}
        return {**texts, "body": row.get("body")}


def _repeated(row: Row) -> RowError:
    assert isinstance(row, Mapping)
    what = f"an earlier line has the custom_id {format_value(row['custom_id'])} already"
    return RowError("duplicate_custom_id", what)


def _beginning(line: bytes) -> Mapping[str, Any]:
    """An object as far as it can be read: of one that is cut, its whole values."""
    try:
        row = from_json(line, allow_partial=True)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int | float) else None
