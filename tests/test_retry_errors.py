"""Failed rows are fixed from the command line, one cause at a time, as the docs describe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from typer.testing import CliRunner

from batchinfer.cli.commands import app
from batchinfer.errors import JobError
from tests.job.datasets import write_parquet

NUM_ROWS = 30
EMPTY, LONG, DIVIDED = 4, 11, 22
JOB = """\
model: {name: MODEL, max_model_len: 128}
input: {path: rows.parquet}
prompt: {template: "TEMPLATE", chat_template: none, on_too_long: ON_TOO_LONG}
sampling: {max_tokens: 4, temperature: 0.0, ignore_eos: true}
engine: {num_kv_blocks: 64}
output: {path: out, rows_per_part: 8}
"""
TEMPLATE = "{{ text }}{{ '' if 1 // divisor else '' }}"
GUARDED = "{{ text }}{{ '' if divisor and 1 // divisor else '' }}"
QUIET = ("--quiet", "--no-report")


class Bench:
    """A folder with a job file and its data, and the results of commands."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._model = model

    def write_job(self, template: str = TEMPLATE, on_too_long: str = "error") -> None:
        text = JOB.replace("MODEL", str(self._model)).replace("TEMPLATE", template)
        (self.folder / "job.yaml").write_text(text.replace("ON_TOO_LONG", on_too_long))

    def write_rows(self, *, empty: str) -> None:
        texts = [f"Words, then number {row}" for row in range(NUM_ROWS)]
        texts[EMPTY], texts[LONG] = empty, "x" * 600
        divisors = [0 if row == DIVIDED else 1 for row in range(NUM_ROWS)]
        write_parquet(self.folder / "rows.parquet", {"text": texts, "divisor": divisors})

    def run(self, *options: str) -> int:
        return self.do("run", "job.yaml", *QUIET, *options)

    def do(self, verb: str, place: str, *options: str) -> int:
        result = CliRunner().invoke(app, [verb, str(self.folder / place), *options])
        error = result.exception
        return int(error.exit_code) if isinstance(error, JobError) else result.exit_code

    def failed(self) -> dict[int, str]:
        """Return the error codes in the output, keyed by row id."""
        parts = (self.folder / "out" / "data").iterdir()
        rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
        assert len(rows) == NUM_ROWS
        return {row["row_id"]: row["error"]["code"] for row in rows if row["error"]}

    def computed(self) -> int:
        """Return the number of good rows that were computed, not copied."""
        summary = json.loads((self.folder / "out" / "summary.json").read_text())
        return int(summary["rows"]["ok"] - summary["rows"]["reused"])


def test_retry_errors_after_each_fix(tmp_path: Path, model: Path) -> None:
    bench = Bench(tmp_path, model)
    bench.write_job()
    bench.write_rows(empty=" ")
    assert bench.run() == 3
    left = {EMPTY: "empty_prompt", LONG: "prompt_too_long", DIVIDED: "template_error"}
    assert bench.failed() == left
    assert bench.computed() == NUM_ROWS - 3

    repairs: dict[int, Callable[[], object]] = {
        EMPTY: lambda: bench.write_rows(empty="repair"),
        LONG: lambda: bench.write_job(on_too_long="truncate_left"),
        DIVIDED: lambda: bench.write_job(GUARDED, on_too_long="truncate_left"),
    }
    for row, repair in repairs.items():
        repair()
        assert bench.run() in (4, 7), "a changed job is refused"
        del left[row]
        assert bench.run("--retry-errors") == (3 if left else 0)
        assert bench.failed() == left
        assert bench.computed() == 1, "only the fixed row is computed"
    assert bench.do("verify", "out") == 0
    assert bench.run() == 0

    assert bench.run("--output", str(tmp_path / "fresh")) == 0
    for part in (tmp_path / "fresh" / "data").iterdir():
        assert part.read_bytes() == (tmp_path / "out" / "data" / part.name).read_bytes()
