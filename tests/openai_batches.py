"""OpenAI batch files for tests: requests, and the responses of ``run-batch``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchinfer.config.options import BatchOptions
from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_batch import run_batch

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def answers(
    folder: Path, model: Path, requests: list[dict[str, Any]], **options: Any
) -> dict[str, dict[str, Any]]:
    """Answer ``requests`` with ``run-batch``; return its output lines, keyed by ``custom_id``."""
    source, target = folder / "batch.jsonl", folder / "answers.jsonl"
    source.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    options = {"dtype": "float32", "quiet": True, "max_error_rate": 1.0, **options}
    assert run_batch(BatchOptions(str(source), str(target), str(model), **options)) is ExitCode.OK
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [one["custom_id"] for one in requests]
    assert verify(OutputDir(folder / "answers.jsonl.batchinfer")).problems == []
    return {line["custom_id"]: line for line in found}
