"""Every example job runs unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.plan.plan_summary import plan_facts
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job

JOBS = Path(__file__).parent.parent.parent / "jobs"
EXAMPLES = sorted(JOBS.glob("*.yaml"))


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "quickstart",
        "shared-prefix",
        "parallel-sampling",
        "chat",
        "beam-search",
        "long-documents",
        "oversubscribed",
        "structured-output",
        "accepted-samples",
        "scoring",
        "jsonl",
        "openai-batch",
        "adapters",
        "quantized",
        "hybrid",
        "labels",
        "notes",
        "captions",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    spec = load_job(path, output=str(tmp_path / "out"), limit=6)
    assert run_job(spec, quiet=True) is ExitCode.OK
    (part,) = (tmp_path / "out" / "data").iterdir()
    rows = pq.read_table(part).to_pylist()
    assert [row["row_id"] for row in rows] == list(range(6))
    for row in rows:
        assert row["status"] == "ok"
        if spec.task == "score":
            best = max(row["score"], key=lambda choice: choice["sum_logprob"])
            assert best["index"] == row["right"]
            continue
        count = len(row["outputs"])
        assert count == spec.sampling.n if spec.accept is None else 1 <= count <= 3
        assert row["generated_text"] == row["outputs"][0]["text"]


def test_the_plan_of_a_hybrid_says_how_much_of_the_pool_states_take(tmp_path: Path) -> None:
    spec = load_job(JOBS / "hybrid.yaml", output=str(tmp_path / "out"), limit=6)
    plan = plan_job(spec)
    assert plan["rows_in_flight"] * plan["blocks_per_state"] <= plan["peak_used_blocks"]
    (state,) = (str(line) for line in plan_facts(plan) if "for each row in flight" in str(line))
    assert f"{plan['blocks_per_state']} blocks" in state


def test_the_openai_example_writes_openais_files(tmp_path: Path) -> None:
    spec = load_job(JOBS / "openai-batch.yaml", output=str(tmp_path), limit=6)
    assert run_job(spec, quiet=True) is ExitCode.OK
    lines = (tmp_path / "openai" / "output.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 6
    assert (tmp_path / "openai" / "errors.jsonl").read_bytes() == b""
