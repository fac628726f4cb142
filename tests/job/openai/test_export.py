"""OpenAI's output files of jobs that are stopped, killed and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.failpoints import VARIABLE
from tests.job.fakes import FakeBuild, job
from tests.job.output.test_resume import Build, stop_at

NUM_ROWS = 40
BAD = {3: "half a li", 22: "[]"}
CHILD = """
import sys
from pathlib import Path
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import FakeBuild
from tests.job.openai.test_export import batch
run_job(batch(Path(sys.argv[1])), build=FakeBuild(), quiet=True)
"""


def batch(tmp_path: Path, **output: Any) -> JobSpec:
    """Return a job that reads requests, some of them bad, from a JSON Lines file."""
    (tmp_path / "in").mkdir(exist_ok=True)
    path = tmp_path / "in" / "x.jsonl"
    if not path.exists():
        path.write_text(
            "\n".join(BAD.get(row) or json.dumps(request(row)) for row in range(NUM_ROWS))
        )
    return job(
        tmp_path,
        input={"format": "openai-batch"},
        prompt={"column": None},
        output={"format": "openai-batch", **output},
        errors={"max_error_rate": 0.1},
    )


def request(row: int) -> dict[str, Any]:
    body = {"prompt": f"{row if row % 5 else 'x'} asks", "model": "echo", "n": 1 + row % 3}
    return {"custom_id": f"r{row}", "method": "POST", "url": "/v1/completions", "body": body}


def lines(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    text = (tmp_path / "out" / "openai" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def check(tmp_path: Path) -> None:
    """Assert that the output holds each answer once, in input order."""
    answered = lines(tmp_path, "output.jsonl")
    good = [row for row in range(NUM_ROWS) if row not in BAD]
    assert [line["custom_id"] for line in answered] == [f"r{row}" for row in good]
    for row, line in zip(good, answered, strict=True):
        texts = [choice["text"] for choice in line["response"]["body"]["choices"]]
        assert texts == [request(row)["body"]["prompt"][:8]] * (1 + row % 3)
    assert [line["error"]["code"] for line in lines(tmp_path, "errors.jsonl")] == 2 * [
        "invalid_json"
    ]
    assert not verify(OutputDir(tmp_path / "out")).problems


@pytest.mark.parametrize("point", ["data-renamed:2", "openai-renamed:1", "_batchinfer-staged:3"])
def test_openai_export_resumes_after_a_kill(tmp_path: Path, point: str) -> None:
    """Kill the run between parts, between the two output files, or before it records the files."""
    spec = batch(tmp_path)
    environment = {**os.environ, VARIABLE: point}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    check(tmp_path)


def test_openai_created_is_the_time_of_the_plan(tmp_path: Path) -> None:
    spec, second = batch(tmp_path), Build()
    assert run_job(spec, build=Build(stop_at(15)), quiet=True) is ExitCode.INTERRUPTED
    assert run_job(spec, build=second, quiet=True) is ExitCode.OK
    assert second.ran
    check(tmp_path)
    created = {line["response"]["body"]["created"] for line in lines(tmp_path, "output.jsonl")}
    assert len(created) == 1


def test_openai_export_after_retry_errors(tmp_path: Path) -> None:
    spec = batch(tmp_path)
    run_job(spec, build=FakeBuild(), quiet=True)
    assert run_job(spec, build=FakeBuild(), quiet=True, retry_errors=True) is ExitCode.OK
    check(tmp_path)


def test_openai_export_after_overwrite(tmp_path: Path) -> None:
    run_job(batch(tmp_path), build=FakeBuild(), quiet=True)
    (tmp_path / "out" / "openai" / "output.jsonl").write_text("something else")
    plain = batch(tmp_path, format="parquet")
    assert run_job(plain, build=FakeBuild(), quiet=True, overwrite=True) is ExitCode.OK
    assert not list((tmp_path / "out" / "openai").iterdir())
    assert not verify(OutputDir(tmp_path / "out")).problems


def test_openai_export_with_renamed_columns(tmp_path: Path) -> None:
    batch(tmp_path)
    spec = job(
        tmp_path,
        input={"format": "openai-batch", "keep_columns": ["method"]},
        prompt={"column": None},
        output={"format": "openai-batch", "rename": {"custom_id": "id", "url": "where"}},
        errors={"max_error_rate": 0.1},
    )
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    check(tmp_path)
