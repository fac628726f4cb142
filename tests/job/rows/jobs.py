"""Helpers that read the outputs of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the output rows of the job that wrote to ``folder/out``."""
    return [
        row
        for path in sorted((folder / "out" / "data").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of the job that wrote to ``folder/out``."""
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_bytes())
    return found
