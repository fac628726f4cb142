"""Reads Arrow text, which may be invalid UTF-8, as bytes; replaces invalid UTF-8 in output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.console.format import format_value
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.arrow_types import (
    BYTES_TYPE,
    as_bytes,
    repeated_field,
    with_leaves,
    without_text,
)

_HAVE_LENGTHS = (pa.binary(), pa.large_binary())
_MOST_CHARS = 16 << 20
_MOST_BYTES = 4 * _MOST_CHARS
"""Maximum length of a row's text in bytes, at four bytes per character."""
_NO_PYTHON_TIME = (OverflowError, pa.ArrowInvalid)


def check_field_names(column: pa.Field) -> None:
    """Raise DataError if two fields of a struct in a column have the same name, because a Python
    dict cannot hold such a struct."""
    name = repeated_field(column.type)
    if name is not None:
        raise DataError(
            f"column {format_value(column.name)} cannot be read: it holds a struct with two fields "
            f"that have the name {format_value(name)}",
            hint="rename one of these fields, or leave the column out of the job",
        )


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Convert the rows of ``batch`` to dicts. Strings become bytes, even inside lists and structs.

    Times become Python objects and lose their nanoseconds. Times outside Python's range and texts
    over the size limit are replaced with a ``RowError``.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(batch.num_rows)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = _python_texts(_cast(column, _as_bytes_and_microseconds), name)
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def python_values(column: pa.Array) -> list[Any]:
    """Convert ``column`` to Python values without loss: strings to bytes, times to integers."""
    return _cast(column, _as_bytes_and_numbers).to_pylist()  # type: ignore[no-any-return]


def is_valid_text(column: pa.Array) -> bool:
    """Return True if all text in ``column`` is UTF-8."""
    # Validating a slice of lists would check the values of all lists, so copy the slice first.
    try:
        pa.concat_arrays([column]).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def with_valid_text(column: pa.Array) -> pa.Array:
    """Replace invalid UTF-8 in ``column`` with U+FFFD; return the same array if all is valid."""
    return column if is_valid_text(column) else _replace_invalid(column)


def _cast(column: pa.Array, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    wanted = _castable(column.type, leaf)
    if column.type == wanted:
        return column
    try:
        return column.cast(wanted, safe=False)
    except pa.ArrowNotImplementedError:  # Arrow has no casts between list views
        return column.view(with_leaves(column.type, as_bytes))


def _castable(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Apply ``leaf`` to the innermost types, even in dictionaries of texts and in extension types
    of text."""

    def innermost(inner: pa.DataType) -> pa.DataType:
        if pa.types.is_dictionary(inner) and inner.value_type in BYTES_TYPE:
            return leaf(inner.value_type)
        if isinstance(inner, pa.BaseExtensionType) and not without_text(inner):
            return _castable(inner.storage_type, leaf)
        return leaf(inner)

    return with_leaves(kind, innermost)


def _python_texts(column: pa.Array, name: str) -> list[Any]:
    """Return a column's values, with errors for long texts and for times outside Python's range."""
    if column.type in _HAVE_LENGTHS and column.nbytes > _MOST_BYTES:
        is_large = pc.fill_null(pc.greater(pc.binary_length(column), _MOST_BYTES), False)
        small = iter(column.filter(pc.invert(is_large)).to_pylist())
        error = RowError("row_too_large", f"column {name} holds more than {_MOST_CHARS} characters")
        return [error if large else next(small) for large in is_large.to_pylist()]
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except _NO_PYTHON_TIME:
        return [_python_time(value, name) for value in column]


def _python_time(value: pa.Scalar, name: str) -> Any:
    try:
        return value.as_py()
    except _NO_PYTHON_TIME:
        why = "its year is not from 1 to 9999, or its time zone is unknown"
        return RowError("template_error", f"column {name} holds a time that cannot be read: {why}")


def _as_bytes_and_microseconds(kind: pa.DataType) -> pa.DataType:
    if not _in_nanoseconds(kind):
        return BYTES_TYPE.get(kind, kind)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")


def _as_bytes_and_numbers(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _castable(kind.storage_type, _as_bytes_and_numbers)
    if not pa.types.is_temporal(kind) or pa.types.is_interval(kind):
        return BYTES_TYPE.get(kind, kind)
    return pa.int32() if kind.bit_width == 32 else pa.int64()


def _in_nanoseconds(kind: pa.DataType) -> bool:
    timed = pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind)
    return bool(timed and kind.unit == "ns")


def _replace_invalid(column: pa.Array) -> pa.Array:
    """Rebuild a column value by value, which is slow."""
    values = [_decoded(value, column.type) for value in python_values(column)]
    try:
        return pa.array(values, column.type)
    except pa.ArrowNotImplementedError:  # pyarrow cannot build extension types inside other types
        return pa.array(values, with_leaves(column.type, _stored)).view(column.type)


def _stored(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return with_leaves(kind.storage_type, _stored)
    return kind


def _decoded(value: Any, kind: pa.DataType) -> Any:
    """Decode the bytes in ``value`` wherever ``kind`` has strings."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return _decoded(value, kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _decoded(value, kind.value_type)
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(_decoded(k, kind.key_type), _decoded(v, kind.item_type)) for k, v in value]
    if isinstance(value, list):
        return [_decoded(item, kind.value_type) for item in value]
    return value.decode("utf-8", errors="replace") if kind in BYTES_TYPE else value
