"""Row groups of Parquet files in batches, with little memory beside them where values are huge.

A value takes pyarrow two to three times its size to read: its page, decompressed, the dictionary
that it may be in, and the value itself. All but the last stay until further pages are read, or the
row group is left. The page as it is in the file goes at once where it is read through a buffer; of
a row group that is fetched beforehand, which takes fewer requests, it stays as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.job.input.format import BATCH_ROWS

_READ_BUFFER = 1 << 20
_LARGE_ROW_BYTES = 1 << 16
"""Of a row group's rows, on average: so large rows are read one by one. What is to be appended to
after a huge value is in it is copied once more."""
_LARGE_GROUP_BYTES = 64 << 20
"""Of a row group: a larger one is not fetched as a whole."""


def open_parquet(
    file: pa.NativeFile, metadata: pq.FileMetaData | None = None, *, fetch_groups: bool = True
) -> pq.ParquetFile:
    """A Parquet file's reader, which checks pages.

    Args:
        metadata: the file's, if it has been read before.
        fetch_groups: fetch row groups as a whole, in few requests; else piece by piece.
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
    """Batches of a row group, of at most ``BATCH_ROWS`` rows."""
    size, rows = _bytes_and_rows(metadata, group)
    # With the reader goes what the row group's last page was read in.
    reader = open_parquet(file, metadata, fetch_groups=size < _LARGE_GROUP_BYTES)
    num_rows = 1 if size >= rows * _LARGE_ROW_BYTES else BATCH_ROWS
    yield from reader.iter_batches(num_rows, row_groups=[group], columns=columns, use_threads=False)


def decode_all(file: pa.NativeFile) -> None:
    """Decode all of a Parquet file, column by column, and keep none of it.

    Raises:
        pyarrow.ArrowException, OSError: it is damaged.
    """
    reader = open_parquet(file)
    for group in range(reader.num_row_groups):
        for name in reader.schema_arrow.names:
            for _ in row_group_batches(file, reader.metadata, group, [name]):
                pass


def _bytes_and_rows(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """Of all columns: asking for one's size ends the process where the footer is damaged there."""
    found = metadata.row_group(group)
    return found.total_byte_size, max(1, found.num_rows)
