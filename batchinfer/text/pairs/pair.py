"""A query and a document of a row."""

from __future__ import annotations

from batchinfer.errors import RowError
from batchinfer.text.encode import unencodable
from batchinfer.text.prompts import RowValues
from batchinfer.text.row_values import decoded

Pair = tuple[str, str]


def read_pair(row: RowValues, columns: Pair) -> Pair:
    """A row's query and document.

    Raises:
        RowError: ``empty_prompt``, ``invalid_utf8``, ``unsupported_content``, ``row_too_large``.
    """
    query, document = (_text(row, name) for name in columns)
    return query, document


def _text(row: RowValues, name: str) -> str:
    value = decoded(row.get(name), name)
    if value is None or (isinstance(value, str) and not value.strip()):
        what = "null" if value is None else "empty or whitespace only"
        raise RowError("empty_prompt", f"column {name} is {what}")
    if not isinstance(value, str):
        raise RowError("unsupported_content", f"column {name}: {type(value).__name__} is no text")
    if error := unencodable(value):
        raise error
    return value
