"""Stores each benchmark result on disk as soon as it is measured."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST_SHOWN = 300  # characters of a value that are printed


class Results:
    """Cells of a table in a folder: appended to ``cells.jsonl`` and merged into ``results.json``.

    A cell that is measured again replaces the earlier cell. Only one process may write at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "cells.jsonl"

    def add(self, stage: str, cell: str, values: dict[str, Any]) -> None:
        line = json.dumps({"stage": stage, "cell": cell, "values": values}, default=str)
        with self._log.open("ab") as file:
            # A process that was killed may have left an incomplete line.
            start = b"\n" if file.tell() and not self._ends_a_line() else b""
            file.write(start + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.merge()
        print(f"{stage}: {cell}: {_text(values)}", flush=True)

    def measure(self, stage: str, cell: str, run: Callable[[], dict[str, Any]]) -> None:
        """Store the result of ``run`` as a cell. If ``run`` raises an error, store the message."""
        try:
            values = run()
        except Exception as error:
            traceback.print_exc()
            values = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        self.add(stage, cell, values)

    def read(self) -> dict[str, dict[str, dict[str, Any]]]:
        cells: dict[str, dict[str, dict[str, Any]]] = {}
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # an incomplete line
            cells.setdefault(entry["stage"], {})[entry["cell"]] = entry["values"]
        return cells

    def merge(self) -> None:
        new = self.folder / "results.json.tmp"
        new.write_text(json.dumps(self.read(), indent=1) + "\n")
        new.replace(self.folder / "results.json")

    def _ends_a_line(self) -> bool:
        with self._log.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"


def _text(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
