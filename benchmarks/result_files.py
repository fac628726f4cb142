"""Writes benchmark results as JSON with one measurement per line, to make comparing files easy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results`` as JSON, with one line per key and per record of a list."""
    lines = ",\n".join(f" {json.dumps(key)}: {_value(value)}" for key, value in results.items())
    path.write_text(f"{{\n{lines}\n}}\n")


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(record)}" for record in value) + "\n ]"
    return json.dumps(value)
