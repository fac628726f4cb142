"""Writes ``requests.jsonl``: quickstart rows as requests of an OpenAI batch file.

python jobs/openai-batch/make_requests.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
FIRST_ROW, NUM_ROWS = 48, 48


def line(at: int, row: dict[str, str]) -> str:
    """Return a request; every eighth one asks for log-probabilities."""
    turns = (("system", row["instruction"]), ("user", row["document"]))
    body: dict[str, Any] = {
        "model": "quickstart/model",
        "messages": [{"role": role, "content": content} for role, content in turns],
        "max_completion_tokens": 64,
        "temperature": 0,
    }
    if at % 8 == 4:
        body |= {"logprobs": True, "top_logprobs": 2}
    request = {"custom_id": row["id"], "method": "POST", "url": "/v1/chat/completions"}
    return json.dumps({**request, "body": body}, ensure_ascii=False)


if __name__ == "__main__":
    rows = pq.read_table(HERE.parent / "quickstart" / "prompts.parquet").slice(FIRST_ROW, NUM_ROWS)
    lines = [line(at, row) + "\n" for at, row in enumerate(rows.to_pylist())]
    (HERE / "requests.jsonl").write_text("".join(lines), encoding="utf-8")
