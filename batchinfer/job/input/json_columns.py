"""Infers Arrow types for the columns of JSON objects, and converts the values to Arrow arrays.

A column is kept as JSON text if its values have no common type, such as a string and a list, or if
Parquet cannot hold their type: an object without keys, or an object whose keys are data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic_core import to_json

_MIXED = pa.binary()  # marks a column of JSON text; no JSON value has this type
_PLAIN = (pa.null(), pa.bool_(), pa.int64(), pa.float64(), pa.string())
_NUMBERS = {pa.int64(), pa.float64()}
_MOST_FIELDS = 200
"""Maximum number of nested fields of a column. If a column has more fields, its keys are treated as
data.
"""
_MARK = {b"batchinfer": b"json"}
_NO_FIT = (pa.ArrowException, OverflowError, TypeError, ValueError)


def json_text(name: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata=_MARK)


def is_json_text(field: pa.Field) -> bool:
    return bool(field.metadata == _MARK)


class ColumnTypes:
    """For each column of JSON objects, a type that can hold all of its values."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType] = {}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Widen the types to hold the values of ``rows``."""
        for name in dict.fromkeys(name for row in rows for name in row):
            self._merge(name, _inferred_type([row.get(name) for row in rows]))

    def add_schema(self, schema: pa.Schema) -> None:
        """Widen the types to hold values of the types in ``schema``."""
        for field in schema:
            self._merge(field.name, _MIXED if is_json_text(field) else field.type)

    def schema(self) -> pa.Schema:
        """Return the columns, in the order in which they first appeared."""
        fields = (pa.field(name, kind) for name, kind in self._types.items())
        return pa.schema([f if _can_be_written(f.type) else json_text(f.name) for f in fields])

    def __len__(self) -> int:
        return len(self._types)

    def _merge(self, name: str, kind: pa.DataType) -> None:
        self._types[name] = _merged(self._types.get(name, pa.null()), kind)


def column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Convert values of a column to an array; ``field`` must come from ``ColumnTypes.schema``."""
    if is_json_text(field):
        texts = (None if v is None else to_json(v, inf_nan_mode="constants") for v in values)
        return pa.array([text and text.decode() for text in texts], pa.string())
    try:
        return pa.array(values, field.type)
    except _NO_FIT:
        return pa.array([_fitted(value, field.type) for value in values], field.type)


def _inferred_type(values: Sequence[Any]) -> pa.DataType:
    try:
        kind = pa.array(values).type
    except _NO_FIT:
        return _MIXED
    return kind if _is_plain(kind) and _num_fields(kind) <= _MOST_FIELDS else _MIXED


def _is_plain(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    return _is_plain(kind.value_type) if pa.types.is_list(kind) else kind in _PLAIN


def _num_fields(kind: pa.DataType) -> int:
    if pa.types.is_struct(kind):
        return sum(_num_fields(field.type) for field in kind)
    return _num_fields(kind.value_type) if pa.types.is_list(kind) else 1


def _can_be_written(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return len(kind) > 0 and all(_can_be_written(field.type) for field in kind)
    return _can_be_written(kind.value_type) if pa.types.is_list(kind) else kind != _MIXED


def _merged(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Return the type that holds the values of both types; ``_MIXED`` if there is none."""
    if left == right or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    if {left, right} == _NUMBERS:
        return pa.float64()
    if pa.types.is_list(left) and pa.types.is_list(right):
        return pa.list_(_merged(left.value_type, right.value_type))
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        fields = {field.name: field.type for field in left}
        for field in right:
            fields[field.name] = _merged(fields.get(field.name, pa.null()), field.type)
        whole = pa.struct(list(fields.items()))
        return whole if _num_fields(whole) <= _MOST_FIELDS else _MIXED
    return _MIXED


def _fitted(value: Any, kind: pa.DataType) -> Any:
    """Convert integers to float where ``kind`` is float, because Arrow refuses large integers."""
    if value is None:
        return None
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_struct(kind):
        return {field.name: _fitted(value.get(field.name), field.type) for field in kind}
    return [_fitted(item, kind.value_type) for item in value] if pa.types.is_list(kind) else value
