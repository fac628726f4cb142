"""What tests of jobs with rows of all tasks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The output rows of the job whose output is ``out`` there."""
    return [
        row
        for path in sorted((folder / "out" / "data").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]


def summary_of(folder: Path) -> dict[str, Any]:
    """Its summary."""
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_bytes())
    return found
