"""Reads Parquet files, and checks their footers.

A file's stored Arrow schema must match its columns. pyarrow ignores parts of the schema that do not
match, so a damaged footer could turn a list into a struct without an error.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import first_line
from batchinfer.errors import DataError
from batchinfer.job.input.arrow_text import check_indices
from batchinfer.job.input.format import (
    READ_ERRORS,
    REWRITE,
    Format,
    InputFile,
    ReadRequest,
    check_unchanged,
    cut,
)
from batchinfer.job.input.parquet_batches import open_parquet, row_group_batches
from batchinfer.job.input.parquet_footer import check_footer, compressed_bytes
from batchinfer.job.storage.reader import store_of

Shape = tuple["str | Shape", ...]
_KEY = b"ARROW:schema"
_MAGIC_BYTES = 8  # a Parquet file ends in the footer's length (4 bytes) and "PAR1"


def check_arrow_schema(metadata: pq.FileMetaData, schema: pa.Schema) -> None:
    """Check that the nesting and names of columns match the Arrow schema stored in the file.

    Files without a stored Arrow schema pass; other writers than pyarrow store none.

    Args:
        metadata: metadata of the file.
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
    """Describe the nesting of a type and the names in it.

    Raises:
        UnicodeDecodeError: a name is not UTF-8.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return shape_of(kind.storage_type)
    if pa.types.is_timestamp(kind):
        # This raises if the time zone is not UTF-8. Time zones are not compared, because INT96
        # times lose theirs.
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
        """Read batches of columns; a DataError names the row group that cannot be read."""
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
                                raise OSError(f"it should have {stop - row} more rows")
                    row = stop
        except READ_ERRORS as error:
            raise DataError(
                f"{file.path}: row group {group} cannot be read: {first_line(error)}",
                hint=f"the file is damaged or has changed; {REWRITE}",
            ) from error

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        """Sum the compressed bytes of the columns in the input.

        Raises:
            DataError: the footer is damaged.
        """
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
        raise ValueError(f"its row groups have {rows} rows, its footer says {metadata.num_rows}")
    return rows


def _footer(file: pa.NativeFile, size: int) -> bytes:
    file.seek(size - _MAGIC_BYTES)
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, size - _MAGIC_BYTES - length))
    return bytes(file.read(length))
