"""Writes ``documents.parquet``: long documents, concatenated from the quickstart's.

python jobs/long-documents/make_documents.py
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
NUM_ROWS = 48
NUM_PIECES = 8


def documents(rows: list[dict[str, str]]) -> pa.Table:
    """Return rows with several documents each, whose instruction belongs to the last document."""
    asked = rows[:NUM_ROWS]
    others = rows[NUM_ROWS:]
    long = []
    for at, row in enumerate(asked):
        before = others[at * (NUM_PIECES - 1) : (at + 1) * (NUM_PIECES - 1)]
        long.append("\n\n".join(piece["document"] for piece in [*before, row]))
    ids, instructions = ([row[name] for row in asked] for name in ("id", "instruction"))
    return pa.table({"id": ids, "instruction": instructions, "document": long})


if __name__ == "__main__":
    source = pq.read_table(HERE.parent / "quickstart" / "prompts.parquet")
    table = documents(source.slice(0, NUM_ROWS * NUM_PIECES).to_pylist())
    pq.write_table(table, HERE / "documents.parquet", compression="zstd")
