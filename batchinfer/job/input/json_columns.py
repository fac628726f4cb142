"""Columns of JSON objects: their types, found from all values, and the values as Arrow arrays.

A column is kept as JSON text if its values have no common type (a text here, a list there), or one
that Parquet cannot hold (an object without keys, or with keys that are data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic_core import to_json

_MIXED = pa.binary()  # stands for JSON text; no JSON value has this type
_PLAIN = (pa.null(), pa.bool_(), pa.int64(), pa.float64(), pa.string())
_NUMBERS = {pa.int64(), pa.float64()}
_MOST_FIELDS = 200
"""Keys of objects in a column with more nested fields than this are data."""
_MARK = {b"batchinfer": b"json"}
_NO_FIT = (pa.ArrowException, OverflowError, TypeError, ValueError)


def json_text(name: str) -> pa.Field:
    """A column of JSON text."""
    return pa.field(name, pa.string(), metadata=_MARK)


def is_json_text(field: pa.Field) -> bool:
    """Whether a column holds JSON text in place of values of many types."""
    return bool(field.metadata == _MARK)


class ColumnTypes:
    """The types that hold all values of the columns of objects."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType] = {}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Widen the types to hold the values of more objects."""
        for name in dict.fromkeys(name for row in rows for name in row):
            self._merge(name, _inferred_type([row.get(name) for row in rows]))

    def add_schema(self, schema: pa.Schema) -> None:
        """Widen the types to hold those of a schema."""
        for field in schema:
            self._merge(field.name, _MIXED if is_json_text(field) else field.type)

    def schema(self) -> pa.Schema:
        """The columns, in the order they were first seen."""
        fields = (pa.field(name, kind) for name, kind in self._types.items())
        return pa.schema([f if _can_be_written(f.type) else json_text(f.name) for f in fields])

    def __len__(self) -> int:
        return len(self._types)

    def _merge(self, name: str, kind: pa.DataType) -> None:
        self._types[name] = _merged(self._types.get(name, pa.null()), kind)


def column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Values of a column as an array; ``ColumnTypes`` has seen them."""
    if is_json_text(field):
        return pa.array([None if v is None else _json_of(v) for v in values], pa.string())
    try:
        return pa.array(values, field.type)
    except _NO_FIT:
        return pa.array([_fitted(value, field.type) for value in values], field.type)


def _json_of(value: Any) -> str:
    return to_json(value, inf_nan_mode="constants").decode()


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


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds values of both; a nested mixed type makes the column mixed."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == _NUMBERS:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(_merged(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = _merged(fields.get(field.name, pa.null()), field.type)
        whole = pa.struct(list(fields.items()))
        return whole if _num_fields(whole) <= _MOST_FIELDS else _MIXED
    return _MIXED


def _fitted(value: Any, kind: pa.DataType) -> Any:
    """``value`` with integers as floats where ``kind`` says so: Arrow refuses large integers."""
    if value is None:
        return None
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_struct(kind):
        return {field.name: _fitted(value.get(field.name), field.type) for field in kind}
    return [_fitted(item, kind.value_type) for item in value] if pa.types.is_list(kind) else value
