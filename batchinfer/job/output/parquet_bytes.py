"""Makes Parquet files in memory, so that a file is written completely or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_MOST_SMALL_BYTES = 64 << 20
_HUGE_BYTES = 32 << 20
_HAVE_LENGTHS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


def parquet_bytes(row_groups: Sequence[pa.Table]) -> bytes:
    """Return a Parquet file with one row group per table, zstd compression, and page checksums."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, row_groups[0].schema, write_page_checksum=True, **_column_options(row_groups)
    ) as writer:
        for table in row_groups:
            writer.write_table(table)
    del writer  # frees the writer's pages
    pa.default_memory_pool().release_unused()
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _column_options(tables: Sequence[pa.Table]) -> dict[str, Any]:
    """Return options that avoid copies of large columns: no dictionaries and no statistics.

    Columns with a huge value also stay uncompressed.
    """
    columns = {
        name: pa.chunked_array([chunk for table in tables for chunk in table[name].chunks], kind)
        for name, kind in zip(tables[0].schema.names, tables[0].schema.types, strict=True)
    }
    large = {name for name, column in columns.items() if column.nbytes > _MOST_SMALL_BYTES}
    if not large:
        return {"compression": "zstd"}
    huge = {name for name in large if _has_huge_value(columns[name])}
    paths = _paths(tables[0].schema)
    small = [path for path, name in paths.items() if name not in large]
    return {
        "compression": {path: "none" if name in huge else "zstd" for path, name in paths.items()},
        "use_dictionary": small,
        "write_statistics": small,
    }


def _has_huge_value(column: pa.ChunkedArray) -> bool:
    return column.type in _HAVE_LENGTHS and pc.max(pc.binary_length(column)).as_py() > _HUGE_BYTES


def _paths(schema: pa.Schema) -> dict[str, str]:
    """Map each Parquet column path, including nested paths, to its column of the table."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    schema_of_file = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
    paths = [schema_of_file.column(at).path for at in range(len(schema_of_file))]
    return {
        path: next(name for name in schema.names if f"{path}.".startswith(f"{name}."))
        for path in paths
    }
