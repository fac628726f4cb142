"""Checks Parquet footers, which have no checksum, by comparing facts that they store twice.

pyarrow does not compare them, and it can crash the process if the entry of a column in a row group
is damaged. This module therefore decodes the few fields that it needs. Sources:
apache/parquet-format, ``parquet.thrift``; apache/thrift, ``doc/specs/thrift-compact-protocol.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

_STRUCT, _LIST, _SET, _MAP = 12, 9, 10, 11
_MOST_NESTED = 64

# Field numbers in FileMetaData, SchemaElement, RowGroup, ColumnChunk and ColumnMetaData.
_FILE_SCHEMA, _FILE_GROUPS = 2, 4
_ELEMENT_TYPE, _ELEMENT_NAME, _ELEMENT_CHILDREN = 1, 4, 5
_GROUP_COLUMNS = 1
_CHUNK_COLUMN = 3
_COLUMN_TYPE, _COLUMN_PATH, _COLUMN_COMPRESSED = 1, 3, 7

Column = tuple[int, tuple[bytes, ...]]
"""A column's physical type, and its names from the top level down."""


def check_footer(footer: bytes) -> None:
    """Check that the first row group has the columns of the file's schema.

    Args:
        footer: the file's metadata, without length and magic bytes.

    Raises:
        ValueError: the columns differ, or the footer is damaged.
    """
    with _damage():
        schema, groups = _schema_and_groups(footer, most_groups=1)
        for group in groups:
            columns = [chunk[_CHUNK_COLUMN] for chunk in group[_GROUP_COLUMNS]]
            found = [(column[_COLUMN_TYPE], tuple(column[_COLUMN_PATH])) for column in columns]
            if list(_leaves(schema)) != found:
                raise ValueError("its footer is damaged: its row groups have other columns")


def compressed_bytes(footer: bytes, columns: Collection[str]) -> int:
    """Sum the compressed bytes of columns over all row groups of a file.

    Args:
        footer: the file's metadata, without length and magic bytes.
        columns: names of top-level columns; nested columns are included.

    Raises:
        ValueError: the footer is damaged.
    """
    names = {name.encode() for name in columns}
    with _damage():
        _, groups = _schema_and_groups(footer)
        chunks = [chunk[_CHUNK_COLUMN] for group in groups for chunk in group[_GROUP_COLUMNS]]
        return sum(int(c[_COLUMN_COMPRESSED]) for c in chunks if c[_COLUMN_PATH][0] in names)


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("its footer is damaged") from error


def _schema_and_groups(footer: bytes, most_groups: int = 1 << 31) -> tuple[list[Any], list[Any]]:
    """Read the elements of the schema, and at most ``most_groups`` row groups after it."""
    reader = _Compact(footer)
    schema: list[Any] = []
    for number, kind in reader.fields():
        if number == _FILE_GROUPS:
            size, item = reader.list_header()
            return schema, [reader.value(item) for _ in range(min(size, most_groups))]
        value = reader.value(kind)
        if number == _FILE_SCHEMA:
            schema = value
    return schema, []


def _leaves(schema: list[dict[int, Any]]) -> Iterator[Column]:
    """Return the columns of a schema, whose elements are in depth-first order from the root."""
    elements = iter(schema)
    for _ in range(next(elements, {}).get(_ELEMENT_CHILDREN, 0)):
        yield from _leaves_below(elements, ())


def _leaves_below(elements: Iterator[dict[int, Any]], above: tuple[bytes, ...]) -> Iterator[Column]:
    element = next(elements, {})
    path = (*above, element.get(_ELEMENT_NAME, b""))
    children = element.get(_ELEMENT_CHILDREN, 0)
    if not children:
        yield element.get(_ELEMENT_TYPE, -1), path
    for _ in range(children if len(path) < _MOST_NESTED else 0):
        yield from _leaves_below(elements, path)


class _Compact:
    """Reads Thrift's compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._depth = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and type of each field of a structure; the caller reads the value."""
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else self._integer()
            yield number, header & 15

    def value(self, kind: int) -> Any:
        """Read a value: structures as dicts by field number, strings as bytes."""
        if kind in (1, 2):  # a field's type is also its bool value; in a list, a bool is a byte
            return kind == 1
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 8:
            return self._take(self._varint())
        if kind in (_LIST, _SET, _MAP, _STRUCT):
            return self._nested(kind)
        return self._take({3: 1, 7: 8}[kind])

    def list_header(self) -> tuple[int, int]:
        """Read the length of a list, and the type of its items."""
        header = self._byte()
        size = header >> 4
        return (self._varint() if size == 15 else size), header & 15

    def _nested(self, kind: int) -> Any:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise IndexError
        if kind == _STRUCT:
            value: Any = {number: self.value(item) for number, item in self.fields()}
        else:
            if kind == _MAP:
                raise IndexError  # Parquet uses no maps
            size, item = self.list_header()
            value = [self._byte() if item in (1, 2) else self.value(item) for _ in range(size)]
        self._depth -= 1
        return value

    def _integer(self) -> int:
        """Read a signed integer in zigzag encoding."""
        number = self._varint()
        return number >> 1 ^ -(number & 1)

    def _varint(self) -> int:
        number = shift = 0
        while (byte := self._byte()) & 128:
            number |= (byte & 127) << shift
            shift += 7
        return number | byte << shift

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _take(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._data):
            raise IndexError
        return self._data[self._at - length : self._at]
