"""Recognizes Arrow types of text and conversations, and rebuilds nested Arrow types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

BYTES_TYPE = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def is_text(kind: pa.DataType) -> bool:
    """Return True for string and binary types; binary values may hold UTF-8 text."""
    return kind in BYTES_TYPE or kind in BYTES_TYPE.values()


def without_text(kind: pa.DataType) -> bool:
    """Return True if a type holds no strings, not even in lists or structs."""
    if pa.types.is_dictionary(kind):
        return without_text(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return without_text(kind.storage_type)
    nested = [kind.field(at).type for at in range(kind.num_fields)]
    return kind not in BYTES_TYPE and all(map(without_text, nested))


def repeated_field(kind: pa.DataType) -> str | None:
    """Return a name that two fields of one struct in a type share; None if no struct repeats a
    name. A struct that repeats a name cannot be converted to a Python dict."""
    if pa.types.is_dictionary(kind):
        return repeated_field(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return repeated_field(kind.storage_type)
    fields = [kind.field(at) for at in range(kind.num_fields)]
    counts = Counter(field.name for field in fields if pa.types.is_struct(kind))
    own = (name for name, count in counts.items() if count > 1)
    inner = (repeated_field(field.type) for field in fields)
    return next((name for name in chain(own, inner) if name is not None), None)


def is_conversation(kind: pa.DataType) -> bool:
    """Return True for lists of structs that have the fields ``role`` and ``content``."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    message = kind.value_type
    return pa.types.is_struct(message) and {"role", "content"} <= {field.name for field in message}


def check_indices(column: pa.Array) -> None:
    """Raise OSError if a dictionary index is out of range, as may happen in damaged files."""
    if pa.types.is_dictionary(column.type):
        first, last = pc.min_max(column.indices).as_py().values()
        if first is not None and not 0 <= first <= last < len(column.dictionary):
            raise OSError("a value is not in the column's dictionary")
    elif pa.types.is_struct(column.type):
        for at in range(column.type.num_fields):
            check_indices(column.field(at))
    elif pa.types.is_map(column.type) or hasattr(column.type, "value_field"):  # any kind of list
        check_indices(column.values)


def with_leaves(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Rebuild a nested type with ``leaf`` applied to its innermost types."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(with_leaves(field.type, leaf)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(with_leaves(kind.key_type, leaf), with_leaves(kind.item_type, leaf))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(with_leaves(kind.value_type, leaf), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(with_leaves(kind.value_type, leaf))
    if pa.types.is_list(kind):
        return pa.list_(with_leaves(kind.value_type, leaf))
    if pa.types.is_list_view(kind):
        return pa.list_view(with_leaves(kind.value_type, leaf))
    if pa.types.is_large_list_view(kind):
        return pa.large_list_view(with_leaves(kind.value_type, leaf))
    return leaf(kind)


def as_bytes(kind: pa.DataType) -> pa.DataType:
    """Replace string types with binary types that have the same buffers."""
    if isinstance(kind, pa.BaseExtensionType):
        return with_leaves(kind.storage_type, as_bytes)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, with_leaves(kind.value_type, as_bytes), kind.ordered)
    return BYTES_TYPE.get(kind, kind)
