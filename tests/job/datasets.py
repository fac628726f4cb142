"""Parquet files for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_parquet(path: Path, columns: dict[str, Any], rows_per_group: int = 1000) -> Path:
    """A Parquet file with page checksums."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True)
    return path


def strings(values: list[bytes | None]) -> pa.Array:
    """A string column that holds these bytes, valid UTF-8 or not."""
    return pa.array(values, pa.binary()).view(pa.string())


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rot(path: Path) -> None:
    """Change a bit as a failing disk does: nobody wrote, so the time stays."""
    before = path.stat()
    flip_bit(path, 40)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
