"""OpenAI batch files as input: a request a line, each with an id that no earlier one has.

A request with several prompts is several rows, one for each, with the prompt's place among them in
``body`` as ``prompt_index``.
"""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic_core import from_json, to_json

from batchinfer.console.format import format_value
from batchinfer.errors import DataError, JobError, RowError
from batchinfer.job.input.format import InputFile, ReadRequest, Row, Rows
from batchinfer.job.input.formats.openai_prompts import (
    KNOWN_URLS,
    PROMPT_INDEX,
    SCORE_KEYS,
    parts_of_body,
)
from batchinfer.job.input.formats.text_file import batched, opened
from batchinfer.job.input.json_columns import json_text
from batchinfer.job.input.jsonl import JsonlFormat, Line, split_lines
from batchinfer.job.storage.urls import is_url

_BYTES = 16

SCHEMA = pa.schema(
    [*((name, pa.string()) for name in ("custom_id", "method", "url")), json_text("body")]
)
_TEXTS = ("custom_id", "method", "url")
_SEVERAL = (b'"prompt"', b'"input"', b'"documents"', *(f'"{k}"'.encode() for k, _ in SCORE_KEYS))
"""Keys that may hold several prompts."""
_TAKEN_KEY = f'"{PROMPT_INDEX}"'.encode()


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
        self._ids.add([_own_id(row) for row in rows])

    def parsed(self, lines: Sequence[Line], path: str) -> list[Row]:
        """Rows of lines, a ``RowError`` for what is no object.

        Raises:
            DataError: an object has no ``custom_id`` by which its answer could be known.
        """
        rows = super().parsed(lines, path)
        for (number, _), row in zip(lines, rows, strict=True):
            if isinstance(row, RowError):
                continue
            custom_id = row.get("custom_id")
            if not isinstance(custom_id, str) or not custom_id:
                given = f"is {format_value(custom_id)}" if "custom_id" in row else "is missing"
                raise DataError(
                    f"{path}, line {number}: custom_id {given}; it must be a text, not empty",
                    hint="give each request one of its own: its answer is found by it",
                )
        return rows

    def batches(self, chunks: Iterable[bytes]) -> Iterator[list[Line]]:
        """Requests of one prompt each."""
        lines = chain.from_iterable(map(_one_prompt_each, split_lines(chunks)))
        return batched(lines, lambda line: len(line[1]))

    def common_schema(self, files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
        """``SCHEMA``, whatever the files hold: there may be no requests at all."""
        return SCHEMA

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Rows with all that is in their lines, whatever columns are asked for."""
        for first, lines in self.wanted_lines(request):
            rows = enumerate(self.parsed(lines, request.file.path), first)
            yield first, [_repeated(row) if self._is_repeated(at, row) else row for at, row in rows]

    def _is_repeated(self, at: int, row: Row) -> bool:
        return not isinstance(row, RowError) and self._ids.is_repeated(at)

    def kept(self, line: Line, path: str) -> Mapping[str, Any]:
        """The columns that go to the output; of a damaged line, as far as they can be read."""
        row = _beginning(line[1])
        texts = {name: _text(row.get(name)) for name in _TEXTS}
        return {**texts, "body": row.get("body")}


def _one_prompt_each(line: Line) -> Iterator[Line]:
    """A line that asks for something of several prompts, texts or pairs as one line for each."""
    number, text = line
    row = _beginning(text) if any(key in text for key in (*_SEVERAL, _TAKEN_KEY)) else {}
    body = row.get("body")
    if isinstance(body, dict) and body.get(PROMPT_INDEX) is not None:
        # A request's own is no number of ours: as a text it is refused when the line is read.
        own = {PROMPT_INDEX: str(body[PROMPT_INDEX])}
        yield number, to_json({**row, "body": {**body, **own}})
        return
    parts = parts_of_body(row.get("url"), body) if isinstance(body, dict) else ()
    if not parts:
        yield line
        return
    try:
        request = from_json(text)
    except ValueError:  # half a line
        yield line
        return
    for index, part in enumerate(parts):
        one = {**request["body"], **part, PROMPT_INDEX: index}
        yield number, to_json({**request, "body": one})


def first_url(path: str) -> str | None:
    """What the first request of a file is made to, among lines that are none; None where there is
    no such line, or the file cannot be read."""
    if not is_url(path) and not os.path.isfile(path):  # what is read from a pipe is gone
        return None
    try:
        with opened(path) as chunks:
            urls = (_text(_beginning(text).get("url")) for _, text in split_lines(chunks))
            return next((url for url in urls if url in KNOWN_URLS), None)
    except (JobError, OSError):
        return None


def prompt_index(body: object) -> int:
    """The place of a row's prompt among those of its request."""
    index = body.get(PROMPT_INDEX, 0) if isinstance(body, Mapping) else 0
    return index if type(index) is int else 0


def _own_id(row: Row) -> str | None:
    """The id of a request, at its first prompt."""
    if isinstance(row, RowError) or prompt_index(row.get("body")):
        return None
    custom_id = row.get("custom_id")
    return custom_id if isinstance(custom_id, str) else None


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
