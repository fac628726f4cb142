"""Reads OpenAI batch files: one request per line, each with a unique ``custom_id``.

A request with several prompts becomes one row per prompt, with the prompt's index as
``prompt_index`` in ``body``. Requests with pairs of texts have the fields of vLLM's
``ScoreRequest`` and ``RerankRequest`` (vllm/entrypoints/pooling/scoring/protocol.py). Jina and
Cohere use the same fields for rerank requests.
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
from batchinfer.job.input.formats.encoding import KEEP_BYTES
from batchinfer.job.input.formats.text_file import opened
from batchinfer.job.input.json_columns import json_text
from batchinfer.job.input.jsonl import JsonlFormat, Line, split_lines
from batchinfer.job.input.unify_schemas import Difference, SchemaMode
from batchinfer.job.storage.urls import is_url

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
"""The ``url`` values of chat requests and of completion requests."""
EMBEDDINGS = "/v1/embeddings"
"""The ``url`` of embedding requests."""
CLASSIFY_URLS = ("/v1/classify", "/classify")
"""The ``url`` values of classification requests."""
SCORE_URLS = ("/v1/score", "/score")
"""The ``url`` values of requests that score pairs of texts."""
RERANK_URLS = ("/v1/rerank", "/v2/rerank", "/rerank")
"""The ``url`` values of requests that rank documents by their relevance to a query."""
KNOWN_URLS = frozenset({CHAT, COMPLETIONS, EMBEDDINGS, *CLASSIFY_URLS, *SCORE_URLS, *RERANK_URLS})
PROMPT_INDEX = "prompt_index"
"""Key added to a row's body: the index of the prompt within its request."""
SCORE_KEYS = (
    *(("text_1", "text_2"), ("data_1", "data_2")),
    *(("queries", "documents"), ("queries", "items")),
)
"""Pairs of keys that name the two texts, or the two lists of texts, of a score request."""

_BYTES = 16

SCHEMA = pa.schema(
    [*((name, pa.string()) for name in ("custom_id", "method", "url")), json_text("body")]
)
_TEXTS = ("custom_id", "method", "url")
_SEVERAL = (b'"prompt"', b'"input"', b'"documents"', *(f'"{k}"'.encode() for k, _ in SCORE_KEYS))
"""Keys of a body that may hold several prompts."""
_TAKEN_KEY = f'"{PROMPT_INDEX}"'.encode()


class CustomIds:
    """Finds repeated request ids, using a 16-byte hash of each id."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, ids: Sequence[str | None]) -> None:
        """Add the ids of the next requests. None is never treated as repeated."""
        for value in ids:
            row = len(self._digests) // _BYTES
            text = f"row {row}" if value is None else f"id {value}"
            self._digests += hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()

    def is_repeated(self, row: int) -> bool:
        """Return True if an earlier request has the id of ``row``; add all ids before the first
        call."""
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

    A line becomes an error row if an earlier line of any file has the same ``custom_id``.
    """

    holds_requests = True

    def __init__(self) -> None:
        super().__init__()
        self.errors = KEEP_BYTES  # a line that is not UTF-8 becomes an error row
        self._ids = CustomIds()

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        """Read a file, and record the ids of its requests. Callers must inspect the dataset's files
        in order."""
        return self.read_whole(path, lambda rows: self._ids.add(list(map(_own_id, rows)))), SCHEMA

    def unite(
        self, schemas: Mapping[str, pa.Schema], mode: SchemaMode
    ) -> tuple[pa.Schema, Mapping[str, Difference]]:
        """Return ``SCHEMA``, even for files without requests."""
        return SCHEMA, {}

    def parsed(self, records: Sequence[Line], path: str) -> list[Row]:
        """Parse lines to requests; an invalid line becomes a ``RowError``. Raise DataError if a
        request has no valid ``custom_id``."""
        rows = super().parsed(records, path)
        for (number, _), row in zip(records, rows, strict=True):
            if isinstance(row, RowError):
                continue
            custom_id = row.get("custom_id")
            if not isinstance(custom_id, str) or not custom_id:
                problem = f"is {format_value(custom_id)}" if "custom_id" in row else "is missing"
                raise DataError(
                    f"{path}, line {number}: custom_id {problem}; it must be a non-empty string",
                    hint="give each request a unique custom_id, which names its answer",
                )
        return rows

    def lines(self, chunks: Iterable[bytes], path: str) -> Iterator[Line]:
        """Split a file into requests with one prompt each."""
        return chain.from_iterable(map(_one_prompt_each, split_lines(chunks)))

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Read whole requests; ``request.columns`` is ignored."""
        for first, lines in self.wanted(request):
            rows = self.parsed(lines, request.file.path)
            for at, row in enumerate(rows):
                if not isinstance(row, RowError) and self._ids.is_repeated(first + at):
                    shown = format_value(row["custom_id"])
                    what = f"an earlier line already has the custom_id {shown}"
                    rows[at] = RowError("duplicate_custom_id", what)
            yield first, rows

    def kept(self, line: Line, path: str) -> Mapping[str, Any]:
        """Return the values of a line to copy to the output; for a damaged line, only complete
        values."""
        row = _beginning(line[1])
        texts = {name: _text(row.get(name)) for name in _TEXTS}
        return {**texts, "body": row.get("body")}


def _one_prompt_each(line: Line) -> Iterator[Line]:
    """Split a line with several prompts or pairs of texts into one line per prompt or pair."""
    number, text = line
    row = _beginning(text) if any(key in text for key in (*_SEVERAL, _TAKEN_KEY)) else {}
    body = row.get("body")
    if isinstance(body, dict) and body.get(PROMPT_INDEX) is not None:
        # The request itself contains the key ``prompt_index``. Make the key's value a string, which
        # is refused later, when the line is read.
        own = {PROMPT_INDEX: str(body[PROMPT_INDEX])}
        yield number, to_json({**row, "body": {**body, **own}})
        return
    parts = parts_of_body(row.get("url"), body) if isinstance(body, dict) else ()
    if not parts:
        yield line
        return
    try:
        request = from_json(text)
    except ValueError:  # a truncated line
        yield line
        return
    for index, part in enumerate(parts):
        prompt_body = {**request["body"], **part, PROMPT_INDEX: index}
        yield number, to_json({**request, "body": prompt_body})


def first_url(path: str) -> str | None:
    """Find the first known request URL in a file; None if no URL is known or reading fails."""
    if not is_url(path) and not os.path.isfile(path):  # a pipe can be read only once
        return None
    try:
        with opened(path) as chunks:
            urls = (_text(_beginning(text).get("url")) for _, text in split_lines(chunks))
            return next((url for url in urls if url in KNOWN_URLS), None)
    except (JobError, OSError):
        return None


def prompt_index(body: object) -> int:
    index = body.get(PROMPT_INDEX, 0) if isinstance(body, Mapping) else 0
    return index if type(index) is int else 0


def _own_id(row: Row) -> str | None:
    """Return the ``custom_id`` of a request's first prompt; None for later prompts and errors."""
    if isinstance(row, RowError) or prompt_index(row.get("body")):
        return None
    custom_id = row.get("custom_id")
    return custom_id if isinstance(custom_id, str) else None


def _beginning(line: bytes) -> Mapping[str, Any]:
    """Parse an object; keep the complete values if the line is truncated."""
    try:
        row = from_json(line, allow_partial=True)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int | float) else None


def parts_of_body(url: object, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Split a request's body by prompts.

    Return, for each prompt, the keys to replace in the body and their new values. Return an empty
    list if the request has only one prompt.
    """
    if url in SCORE_URLS:
        return _pairs(body)
    of_texts = url == EMBEDDINGS or url in CLASSIFY_URLS
    key = "documents" if url in RERANK_URLS else "input" if of_texts else "prompt"
    parts = body.get(key)
    kinds = str | dict if url in RERANK_URLS else str | list
    if not isinstance(parts, list) or len(parts) < 2:
        return []
    return [{key: part} for part in parts] if all(isinstance(p, kinds) for p in parts) else []


def score_keys(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find the keys of the two texts in the body of a score request; vLLM allows several names."""
    return next((keys for keys in SCORE_KEYS if all(name in body for name in keys)), None)


def _pairs(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    keys = score_keys(body)
    if keys is None:
        return []
    ones, others = (_listed(body[name]) for name in keys)
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others) or len(ones) < 2:
        return []
    return [dict(zip(keys, pair, strict=True)) for pair in zip(ones, others, strict=True)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
