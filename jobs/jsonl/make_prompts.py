"""Writes ``prompts.jsonl``: quickstart rows as lines, a few with sampling parameters.

python jobs/jsonl/make_prompts.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
NUM_ROWS = 48


def line(at: int, row: dict[str, str]) -> str:
    """Return a row: id, conversation, and sampling parameters for every eighth row."""
    turns = (("system", row["instruction"]), ("user", row["document"]))
    messages = [{"role": role, "content": content} for role, content in turns]
    made: dict[str, Any] = {"id": row["id"], "messages": messages}
    if at % 8 == 5:
        made["sampling_params"] = {"temperature": 0.7, "seed": at}
    return json.dumps(made, ensure_ascii=False)


if __name__ == "__main__":
    rows = pq.read_table(HERE.parent / "quickstart" / "prompts.parquet").slice(0, NUM_ROWS)
    lines = [line(at, row) + "\n" for at, row in enumerate(rows.to_pylist())]
    (HERE / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
