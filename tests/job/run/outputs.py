"""Inputs and outputs of the jobs in the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.job.datasets import write_parquet


def numbered(tmp_path: Path, count: int = 25) -> list[str]:
    """Write prompts that all end differently."""
    prompts = [f"{row % 7} is the number {row}" for row in range(count)]
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": prompts, "n": range(count)})
    return prompts


def output(tmp_path: Path) -> pa.Table:
    return pq.read_table(sorted((tmp_path / "out" / "data").iterdir()))


def summary(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "summary.json").read_bytes())


def snapshot(tmp_path: Path) -> dict[str, tuple[int, bytes]]:
    data = tmp_path / "out" / "data"
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in data.iterdir()}


def tree(tmp_path: Path) -> dict[str, tuple[int, bytes]]:
    """Return the time and content of all files of the output except the lock."""
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files if p.stem != "lock"}
