"""Writes ``conversations.parquet``: quickstart rows as conversations.

python jobs/chat/make_conversations.py
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
NUM_ROWS = 64


def conversations(rows: list[dict[str, str]]) -> pa.Table:
    """Return a conversation per row: instruction, an example with its answer, and the document."""
    by_task: dict[str, dict[str, str]] = {}
    messages = []
    for row in rows:
        example = by_task.setdefault(row["task"], row)
        turns = [("system", row["instruction"])]
        if example is not row:
            turns += [("user", example["document"]), ("assistant", example["answer"])]
        turns.append(("user", row["document"]))
        messages.append([{"role": role, "content": content} for role, content in turns])
    ids = [row["id"] for row in rows]
    return pa.table({"id": ids, "messages": pa.array(messages, pa.list_(MESSAGE))})


if __name__ == "__main__":
    source = pq.read_table(HERE.parent / "quickstart" / "prompts.parquet")
    table = conversations(source.slice(0, NUM_ROWS).to_pylist())
    pq.write_table(table, HERE / "conversations.parquet", compression="zstd")
