"""Whole jobs on a model without attention, whose pool holds only recurrent states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.output import part_writer
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.plan.plan_summary import plan_facts
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.worker.model_runner import ModelRunner
from tests.job.fakes import AtOnce
from tests.models import RECURRENT_FAMILIES, make_text_model

PREFIXES = ["Translate this sentence into French: ", "Say in one word what this is about: "]
PROMPTS = [PREFIXES[row % 2] + f"{row} plus {row * row}" for row in range(16)]
SLOTS_PER_STATE = 5  # three layers of matrices, and their convolutions in two slots
NUM_STATES = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "tiny", "mamba2")


def job(folder: Path, model: Path, **engine: Any) -> JobSpec:
    pq.write_table(pa.table({"text": PROMPTS}), folder / "rows.parquet")
    return JobSpec.model_validate(
        {
            "model": {"name": str(model)},
            "input": {"path": str(folder / "rows.parquet")},
            "prompt": {"column": "text", "chat_template": "none"},
            "sampling": {"max_tokens": 5, "temperature": 1.0, "n": 2, "ignore_eos": True},
            "engine": {"num_kv_blocks": NUM_STATES * SLOTS_PER_STATE, **engine},
            "output": {"path": str(folder / "out"), "include": ["token_ids"], "rows_per_part": 4},
        }
    )


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "out" / "data").glob("*.parquet")}


def tokens(folder: Path) -> list[Any]:
    rows = pq.read_table(folder / "out" / "data").sort_by("row_id").to_pylist()
    return [[output["token_ids"] for output in row["outputs"]] for row in rows]


def test_plan_matches_the_run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Let all steps take equally long: measured times vary too much on a busy machine.
    monkeypatch.setattr("batchinfer.engine.simulate.dry_run.step_seconds", lambda *_: 1e6)
    spec = job(tmp_path, model)
    plan = plan_job(spec)
    assert run_job(spec, quiet=True) is ExitCode.OK
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet").to_pydict()
    assert steps["state_slots_used"] == steps["kv_blocks_used"]
    assert plan["peak_used_blocks"] == summary["kv"]["peak_used_blocks"]
    # A snapshot of the current prefix takes the remaining state.
    assert plan["peak_used_blocks"] == (NUM_STATES - 1) * SLOTS_PER_STATE
    assert plan["rows_in_flight"] == max(steps["num_running"])
    assert plan["sharing"] == pytest.approx(summary["sharing"])
    # Prefixes of a few tokens are too short to share.
    assert summary["sharing"]["achieved_of_planned"] > 0.95
    for stats in (plan, summary["kv"]):
        assert (stats["block_size"], stats["mean_waste"], stats["contiguous_waste"]) == (0, 0, 0)
    lines = "\n".join(map(str, plan_facts(plan)))
    assert f"{NUM_STATES * SLOTS_PER_STATE} blocks of recurrent state" in lines
    assert "of the pool; the rest holds the states of shared prefixes" in lines


def test_killed_job_resumes_to_equal_bytes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resumed_job(tmp_path, model, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_killed_job_of_each_family_resumes_to_equal_bytes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_text_model(tmp_path / "tiny", family)
    check_resumed_job(tmp_path, model, monkeypatch, num_kv_blocks=400, max_num_seqs=4)


def check_resumed_job(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, **engine: Any
) -> None:
    """Resume a job from the files that kill -9 would leave after two parts, and compare its parts
    with those of an undisturbed run."""
    spec, killed = job(folder, model, order="input", **engine), folder / "killed"
    submit = ModelRunner.submit

    def submit_and_copy(runner: ModelRunner, step: Any) -> Any:
        if len(parts(folder)) == 2 and not killed.exists():
            shutil.copytree(folder / "out", killed)
        return submit(runner, step)

    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 1)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)
    monkeypatch.setattr(ModelRunner, "submit", submit_and_copy)
    assert run_job(spec, quiet=True) is ExitCode.OK
    whole = parts(folder)
    shutil.rmtree(folder / "out")
    killed.rename(folder / "out")
    assert len(parts(folder)) == 2
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert parts(folder) == whole


def test_outputs_do_not_depend_on_pool_or_reuse(tmp_path: Path, model: Path) -> None:
    outputs = []
    for at, engine in enumerate(
        [{}, {"num_kv_blocks": SLOTS_PER_STATE}, {"enable_prefix_caching": False}]
    ):
        (folder := tmp_path / str(at)).mkdir()
        assert run_job(job(folder, model, **engine), quiet=True) is ExitCode.OK
        outputs.append(tokens(folder))
    assert outputs[0] == outputs[1] == outputs[2]
