"""Parquet files as input: what their footers say, and their rows.

The Arrow schema that pyarrow keeps in a file must be that of the file's columns. pyarrow takes from
it what Parquet cannot say, and passes over what does not go with the columns: a damaged footer can
so make a list a struct.
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
    MEND,
    READ_ERRORS,
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
    """Check that columns are nested, and named, as the file's own Arrow schema says.

    Args:
        metadata: the file's; a file of another writer has no Arrow schema, and nothing to check.
        schema: as pyarrow makes it of both.

    Raises:
        ValueError: they are nested in another way, or something in it is no text.
    """
    kept = (metadata.metadata or {}).get(_KEY)
    if kept is None:
        return
    stored = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(kept)))
    if shape_of(pa.struct(list(stored))) != shape_of(pa.struct(list(schema))):
        raise ValueError("its footer is damaged: columns are nested otherwise than its schema says")


def shape_of(kind: pa.DataType) -> Shape:
    """How a type is nested, and the names in it.

    Raises:
        UnicodeDecodeError: one of them is no text.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return shape_of(kind.storage_type)
    if pa.types.is_timestamp(kind):
        _ = kind.tz  # UnicodeDecodeError, where it is no text; times of 96 bits lose theirs
    if pa.types.is_struct(kind):
        fields = ((field.name, shape_of(field.type)) for field in kind)
        return ("struct", *(part for field in fields for part in field))
    if pa.types.is_map(kind):
        return ("map", shape_of(kind.key_type), shape_of(kind.item_type))
    if not pa.types.is_dictionary(kind) and hasattr(kind, "value_field"):  # lists of all kinds
        return ("list", shape_of(kind.value_type))
    return ("value",)


class ParquetFormat:
    """Parquet files, their footers and page checksums checked; ``TypedFormat``."""

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        store = store_of(path)
        try:
            stat = store.stat(path)
            if stat.size == 0:
                raise DataError(f"{path} is empty (0 bytes), not a Parquet file; {MEND}")
            with store.open(path) as file:
                with open_parquet(file) as reader:
                    num_rows, schema = _num_rows(reader.metadata), reader.schema_arrow
                    check_arrow_schema(reader.metadata, schema)
                footer = _footer(file, stat.size)
            check_footer(footer)
        except (*READ_ERRORS, ValueError) as error:
            raise DataError(
                f"{path} cannot be read as Parquet: {first_line(error)}", hint=MEND
            ) from error
        digest = hashlib.sha256(footer).hexdigest()
        return InputFile.of(path, stat, num_rows, digest), schema

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of columns; DataError names the row group."""
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
                            _check_indices(batch)
                            length, chosen = len(batch), batch.select(columns)
                            pieces = cut(chosen, length, row, wanted, pa.RecordBatch.slice)
                            del batch, chosen  # a huge one goes with its last piece
                            yield from pieces
                            row += length
                            if not wanted or wanted[0].start >= stop:
                                break
                        else:
                            _check_complete(row, stop)
                    row = stop
        except READ_ERRORS as error:
            raise DataError(
                f"{file.path}: row group {group} cannot be read: {first_line(error)}",
                hint=f"the file is damaged or has changed; {MEND}",
            ) from error

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        """Compressed bytes of the columns in the input; DataError where its footer is damaged."""
        if not columns:
            return 0
        with store_of(file.path).open(file.path) as opened:
            footer = _footer(opened, file.size)
        try:
            return compressed_bytes(footer, columns)
        except ValueError as error:
            raise DataError(f"{file.path} cannot be read as Parquet: {error}", hint=MEND) from error


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


def _check_indices(batch: pa.RecordBatch) -> None:
    for column in batch.columns:
        check_indices(column)


def _check_complete(row: int, stop: int) -> None:
    if row != stop:
        raise OSError(f"it should have {stop - row} more rows")
