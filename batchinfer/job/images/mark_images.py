"""Marks the image files in rows, using the types of the columns.

A row holds both texts and binary values as bytes. Only the type of the column shows whether bytes
are a text, such as a path, or an image file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from batchinfer.errors import RowError
from batchinfer.job.input.arrow_types import is_conversation
from batchinfer.job.rows.read_prompts import Prompts
from batchinfer.text.images.files import ImageFile
from batchinfer.text.prompts import Prompt
from batchinfer.text.row_values import IMAGE_KEYS

_Mark = Callable[[Any], Any]
"""Function that replaces the bytes of each image file in a value with an ``ImageFile``."""
_BINARY = (pa.binary(), pa.large_binary(), pa.binary_view())
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


def with_marked_images(
    prompts: Prompts, schema: pa.Schema, image_columns: Collection[str]
) -> Prompts:
    """Wrap ``prompts`` so that it marks the image files in rows before it makes prompts."""
    mark = mark_of_rows(schema, image_columns)
    return prompts if mark is None else _MarkedPrompts(prompts, mark)


def mark_of_rows(schema: pa.Schema, image_columns: Collection[str]) -> _Mark | None:
    """Return a function that marks the image files in rows; None if no column can hold any."""
    marks = {
        field.name: _mark_of(field.type)
        if field.name in image_columns
        else _mark_of_conversations(field.type)
        for field in schema
    }
    found = {name: mark for name, mark in marks.items() if mark is not None}
    return partial(_in_struct, found) if found else None


class _MarkedPrompts:
    def __init__(self, prompts: Prompts, mark: _Mark) -> None:
        self.columns = prompts.columns
        self._prompts = prompts
        self._mark = mark

    def start(self, rows: Sequence[Mapping[str, object]]) -> Callable[[], list[Prompt | RowError]]:
        return self._prompts.start(list(map(self._mark, rows)))


def _mark_of_conversations(kind: pa.DataType) -> _Mark | None:
    """Return a function that marks image files in conversations; None if the type allows none."""
    if not is_conversation(kind):
        return None
    parts = kind.value_type.field("content").type
    if not isinstance(parts, _LISTS) or not pa.types.is_struct(parts.value_type):
        return None
    marks = {field.name: _mark_of(field.type) for field in parts.value_type}
    found = {name: mark for name in IMAGE_KEYS if (mark := marks.get(name)) is not None}
    if not found:
        return None
    part = partial(_in_struct, found)
    return partial(_in_list, partial(_in_struct, {"content": partial(_in_list, part)}))


def _mark_of(kind: pa.DataType) -> _Mark | None:
    """Return a function that marks image files in cells; None if the type allows none."""
    if pa.types.is_dictionary(kind):
        return _mark_of(kind.value_type)
    if kind in _BINARY:
        return _as_file
    if isinstance(kind, _LISTS):
        item = _mark_of(kind.value_type)
        return None if item is None else partial(_in_list, item)
    if pa.types.is_struct(kind) and "bytes" in [field.name for field in kind]:
        mark = _mark_of(kind.field("bytes").type)
        return None if mark is None else partial(_in_struct, {"bytes": mark})
    return None


def _as_file(value: Any) -> Any:
    return ImageFile(value) if isinstance(value, bytes) and value else value


def _in_list(mark: _Mark, value: Any) -> Any:
    return [mark(item) for item in value] if isinstance(value, list) else value


def _in_struct(marks: Mapping[str, _Mark], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: marks[name](item) if name in marks else item for name, item in value.items()}
