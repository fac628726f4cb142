"""Reads Parquet files in batches, with little extra memory for huge values, and checks footers.

A footer has no checksum, and pyarrow can crash the process if the entry of a column in a row group
is damaged. This module therefore decodes the few fields that it needs, and compares values that a
footer stores twice. Sources: apache/parquet-format, ``parquet.thrift``; apache/thrift,
``doc/specs/thrift-compact-protocol.md``. The Arrow schema that a file stores must match the file's
columns too: pyarrow ignores parts of the schema that do not match, so a list could become a struct
without an error.

pyarrow needs two to three times the size of a value to read it: the decompressed page, possibly a
dictionary, and the value. The page and the dictionary stay in memory until more pages are read or
the reader is freed. A compressed page that is read through a buffer is freed at once. But if a row
group is fetched as a whole, which takes fewer requests, the compressed pages stay in memory as long
as the decompressed pages.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import first_line
from batchinfer.errors import DataError
from batchinfer.job.input.arrow_types import check_indices
from batchinfer.job.input.format import (
    BATCH_ROWS,
    READ_ERRORS,
    REWRITE,
    Format,
    InputFile,
    ReadRequest,
    check_unchanged,
    cut,
)
from batchinfer.job.storage.reader import store_of

Shape = tuple["str | Shape", ...]
_KEY = b"ARROW:schema"
_MAGIC_BYTES = 8  # a Parquet file ends in the footer's length (4 bytes) and "PAR1"

_READ_BUFFER = 1 << 20
_LARGE_ROW_BYTES = 1 << 16
"""Rows are read one by one if their average size in a row group is at least this many bytes,
because appending a row to a batch copies the huge values that are already in the batch."""
_LARGE_GROUP_BYTES = 64 << 20
"""Row groups of at least this size are fetched piece by piece."""

_STRUCT, _LIST, _SET, _MAP = 12, 9, 10, 11
_MOST_NESTED = 64

# Field numbers in FileMetaData, SchemaElement, RowGroup, ColumnChunk and ColumnMetaData.
_FILE_SCHEMA, _FILE_GROUPS = 2, 4
_ELEMENT_TYPE, _ELEMENT_NAME, _ELEMENT_CHILDREN = 1, 4, 5
_GROUP_COLUMNS = 1
_CHUNK_COLUMN = 3
_COLUMN_TYPE, _COLUMN_PATH, _COLUMN_COMPRESSED = 1, 3, 7

Column = tuple[int, tuple[bytes, ...]]
"""A column's physical type, and its path: the names from the top-level column down."""


def check_arrow_schema(metadata: pq.FileMetaData, schema: pa.Schema) -> None:
    """Check that the nesting and names of columns match the Arrow schema stored in the file.

    Files without a stored Arrow schema pass, because many writers do not store one.

    Args:
        schema: the schema as pyarrow reads it from the file.

    Raises:
        ValueError: the nesting or a name differs, or a name is not UTF-8.
    """
    stored_schema = (metadata.metadata or {}).get(_KEY)
    if stored_schema is None:
        return
    stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(stored_schema)))
    if shape_of(pa.struct(list(stored))) != shape_of(pa.struct(list(schema))):
        raise ValueError("its footer is damaged: its columns do not match its Arrow schema")


def shape_of(kind: pa.DataType) -> Shape:
    """Describe the nesting of a type and the names in it. Raise UnicodeDecodeError if a name is not
    UTF-8."""
    if isinstance(kind, pa.BaseExtensionType):
        return shape_of(kind.storage_type)
    if pa.types.is_timestamp(kind):
        # Reading ``tz`` raises an error if the time zone is not UTF-8. Time zones are not compared,
        # because INT96 timestamps lose them.
        _ = kind.tz
    if pa.types.is_struct(kind):
        fields = ((field.name, shape_of(field.type)) for field in kind)
        return ("struct", *(part for field in fields for part in field))
    if pa.types.is_map(kind):
        return ("map", shape_of(kind.key_type), shape_of(kind.item_type))
    if not pa.types.is_dictionary(kind) and hasattr(kind, "value_field"):  # any kind of list
        return ("list", shape_of(kind.value_type))
    return ("value",)


class ParquetFormat(Format):
    """Parquet files, with checks of their footers and page checksums."""

    has_unchecked_text = True

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        store = store_of(path)
        try:
            stat = store.stat(path)
            if stat.size == 0:
                raise DataError(f"{path} is empty (0 bytes), not a Parquet file; {REWRITE}")
            with store.open(path) as file:
                with open_parquet(file) as reader:
                    num_rows, schema = _num_rows(reader.metadata), reader.schema_arrow
                    check_arrow_schema(reader.metadata, schema)
                footer = _footer(file, stat.size)
            check_footer(footer)
        except (*READ_ERRORS, ValueError) as error:
            raise DataError(
                f"{path} cannot be read as Parquet: {first_line(error)}", hint=REWRITE
            ) from error
        digest = hashlib.sha256(footer).hexdigest()
        return InputFile.of(path, stat, num_rows, digest), schema

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read batches of columns; a DataError names a row group that cannot be read."""
        file, columns, wanted = request.file, request.columns, request.wanted
        group, row = 0, request.first_row
        try:
            check_unchanged(file)
            with store_of(file.path).open(file.path) as opened:
                metadata = open_parquet(opened).metadata
                for group in range(metadata.num_row_groups):
                    stop = row + metadata.row_group(group).num_rows
                    if wanted and wanted[0].start < stop:
                        for batch in row_group_batches(opened, metadata, group, columns):
                            for at in range(batch.num_columns):
                                check_indices(batch.column(at))
                            length = len(batch)
                            pieces = cut(batch.select(columns), row, wanted)
                            del batch  # so that a huge batch is freed with its last piece
                            yield from pieces
                            row += length
                            if not wanted or wanted[0].start >= stop:
                                break
                        else:
                            if row != stop:
                                raise OSError(f"{stop - row} rows are missing from it")
                    row = stop
        except READ_ERRORS as error:
            raise DataError(
                f"{file.path}: row group {group} cannot be read: {first_line(error)}",
                hint=f"the file is damaged or has changed; {REWRITE}",
            ) from error

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        """Sum the compressed bytes of the columns in the input. Raise DataError if the footer is
        damaged."""
        if not columns:
            return 0
        with store_of(file.path).open(file.path) as opened:
            footer = _footer(opened, file.size)
        try:
            return compressed_bytes(footer, columns)
        except ValueError as error:
            raise DataError(
                f"{file.path} cannot be read as Parquet: {error}", hint=REWRITE
            ) from error


def _num_rows(metadata: pq.FileMetaData) -> int:
    rows: int = sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise ValueError(
            f"its row groups have {rows} rows, but its footer says {metadata.num_rows}"
        )
    return rows


def _footer(file: pa.NativeFile, size: int) -> bytes:
    file.seek(size - _MAGIC_BYTES)
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, size - _MAGIC_BYTES - length))
    return bytes(file.read(length))


def open_parquet(
    file: pa.NativeFile, metadata: pq.FileMetaData | None = None, *, fetch_groups: bool = True
) -> pq.ParquetFile:
    """Open a Parquet file for reading, with verification of page checksums.

    Args:
        metadata: metadata of the file if it was read before.
        fetch_groups: fetch row groups as a whole, in few requests, instead of piece by piece.
    """
    buffer_size = 0 if isinstance(file, pa.BufferReader) else _READ_BUFFER
    return pq.ParquetFile(
        file,
        metadata=metadata,
        buffer_size=buffer_size,
        pre_buffer=fetch_groups,
        page_checksum_verification=True,
    )


def row_group_batches(
    file: pa.NativeFile, metadata: pq.FileMetaData, group: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read a row group in batches of at most ``BATCH_ROWS`` rows."""
    size, rows = _bytes_and_rows(metadata, group)
    # Open a reader for each row group, because freeing a reader frees its last page.
    reader = open_parquet(file, metadata, fetch_groups=size < _LARGE_GROUP_BYTES)
    num_rows = 1 if size >= rows * _LARGE_ROW_BYTES else BATCH_ROWS
    yield from reader.iter_batches(num_rows, row_groups=[group], columns=columns, use_threads=False)


def decode_all(file: pa.NativeFile) -> None:
    """Decode a Parquet file column by column, and discard the values. Raise pyarrow.ArrowException
    or OSError if the file is damaged."""
    reader = open_parquet(file)
    for group in range(reader.num_row_groups):
        for name in reader.schema_arrow.names:
            for _ in row_group_batches(file, reader.metadata, group, [name]):
                pass


def _bytes_and_rows(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """Return the size in bytes and number of rows of a row group. The size covers all columns,
    because asking pyarrow for the size of one column can crash the process if the footer is
    damaged."""
    found = metadata.row_group(group)
    return found.total_byte_size, max(1, found.num_rows)


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
                raise ValueError(
                    "its footer is damaged: the columns of its row groups do not match its schema"
                )


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
    """Yield the columns of a schema, whose elements are in depth-first order from the root."""
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
        """Yield the number and type of each field of a struct; the caller must read each value."""
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else self._integer()
            yield number, header & 15

    def value(self, kind: int) -> Any:
        """Read a value. Structs become dicts keyed by field number, and strings become bytes."""
        if kind in (1, 2):  # a bool field's type is its value; bools in lists are bytes
            return kind == 1
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 8:
            return self._take(self._varint())
        if kind in (_LIST, _SET, _MAP, _STRUCT):
            return self._nested(kind)
        return self._take({3: 1, 7: 8}[kind])

    def list_header(self) -> tuple[int, int]:
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
