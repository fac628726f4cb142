"""Parquet files for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_parquet(path: Path, columns: dict[str, Any], rows_per_group: int = 1000) -> Path:
    """Write a Parquet file with page checksums; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True)
    return path


def strings(values: list[bytes | None]) -> pa.Array:
    """Return a string column of these bytes, which may be invalid UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rot(path: Path) -> None:
    """Flip a bit and keep the modification time, as a failing disk does."""
    before = path.stat()
    flip_bit(path, 40)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
