"""Reads row groups of Parquet files in batches, with little extra memory for huge values.

pyarrow needs two to three times the size of a value to read it: the decompressed page, possibly a
dictionary, and the value. The page and the dictionary stay in memory until more pages are read or
the reader is freed. The compressed page is freed at once if it is read through a buffer. If the row
group is fetched as a whole, which takes fewer requests, the compressed pages stay as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.job.input.format import BATCH_ROWS

_READ_BUFFER = 1 << 20
_LARGE_ROW_BYTES = 1 << 16
"""If rows of a row group have at least this size on average, they are read one by one, because
appending a row to a batch copies the huge values in the batch.
"""
_LARGE_GROUP_BYTES = 64 << 20
"""Row groups of at least this size are fetched piece by piece."""


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
    """Decode a Parquet file column by column to check it, and discard the values.

    Raises:
        pyarrow.ArrowException, OSError: the file is damaged.
    """
    reader = open_parquet(file)
    for group in range(reader.num_row_groups):
        for name in reader.schema_arrow.names:
            for _ in row_group_batches(file, reader.metadata, group, [name]):
                pass


def _bytes_and_rows(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """Return the size in bytes and number of rows of a row group. The size covers all columns,
    because asking pyarrow for one column can crash the process if the footer is damaged.
    """
    found = metadata.row_group(group)
    return found.total_byte_size, max(1, found.num_rows)
