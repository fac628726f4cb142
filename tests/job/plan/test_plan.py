"""A plan predicts what its run does."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from batchinfer.cli.commands import app
from batchinfer.console.table import plain
from batchinfer.errors import DeviceError, ExitCode
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.plan.plan_summary import plan_facts
from batchinfer.job.plan.row_counts import sampled_parts
from batchinfer.job.row_ranges import Part
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.datasets import strings, write_parquet
from tests.job.job_files import MINIMAL, write_job
from tests.models import make_text_model

Columns = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


SWAP = {"swap_space": "64MiB"}
"""Set explicitly, because the default depends on the free memory of the machine."""


def job(tmp_path: Path, model: Path, columns: Columns, **sections: dict[str, Any]) -> JobSpec:
    """Return a job that reads ``columns``; each row generates ``max_tokens`` tokens."""
    fields: dict[str, dict[str, Any]] = {
        "model": {"name": str(model)},
        "input": {"path": str(write_parquet(tmp_path / "rows.parquet", columns))},
        "prompt": {"column": "prompt", "chat_template": "none"},
        "sampling": {"max_tokens": 16, "ignore_eos": True},
        "engine": {"device": "cpu", "num_kv_blocks": 300, "max_num_seqs": 64},
        "output": {"path": str(tmp_path / "out")},
        "errors": {"max_error_rate": 1.0},
    }
    for name, values in sections.items():
        fields[name] = {**fields.get(name, {}), **values}
    return JobSpec.model_validate(fields)


def texts(seed: int, count: int, shortest: int, longest: int) -> list[str]:
    """Return random lower-case texts in which each letter is a token."""
    random_ = random.Random(seed)
    lengths = [random_.randint(shortest, longest) for _ in range(count)]
    return ["".join(random_.choices("abcdefghij", k=length)) for length in lengths]


def up_to(longest: int, prompts: list[str]) -> list[str]:
    """Return sampling parameters with a random output length for each row."""
    random_ = random.Random(1)
    return [json.dumps({"max_tokens": random_.randint(4, longest)}) for _ in prompts]


def mixed_lengths() -> tuple[Columns, dict[str, Any]]:
    prompts = texts(0, 128, 16, 128)
    return {"prompt": prompts, "sampling_params": up_to(64, prompts)}, {}


def shared_prefix() -> tuple[Columns, dict[str, Any]]:
    common = texts(2, 3, 117, 117)
    prompts = [common[at % 3] + own for at, own in enumerate(texts(3, 96, 20, 40))]
    columns = {"prompt": prompts, "sampling_params": up_to(48, prompts)}
    return columns, {"engine": {"num_kv_blocks": 150}}


def samples() -> tuple[Columns, dict[str, Any]]:
    prompts = texts(4, 40, 60, 100)
    columns = {"prompt": prompts, "sampling_params": up_to(64, prompts)}
    return columns, {"sampling": {"n": 8, "temperature": 1.0}}


def equal_rows() -> tuple[Columns, dict[str, Any]]:
    prompts = texts(7, 60, 16, 128) * 3
    cells = up_to(48, prompts[:60]) * 3
    columns = {"prompt": prompts, "sampling_params": cells}
    return columns, {"sampling": {"temperature": 0.0}}


def small_steps_in_input_order() -> tuple[Columns, dict[str, Any]]:
    engine = {
        "order": "input",
        "block_size": 8,
        "max_num_batched_tokens": 96,
        "num_kv_blocks": 200,
        "max_num_seqs": 24,
    }
    return {"prompt": texts(5, 120, 4, 160)}, {"engine": engine}


def stored_in_fp8() -> tuple[Columns, dict[str, Any]]:
    engine = {"kv_cache_dtype": "fp8", "num_kv_blocks": 60}
    return {"prompt": texts(6, 40, 16, 64)}, {"engine": engine}


@pytest.mark.parametrize(
    "workload",
    [
        *(mixed_lengths, shared_prefix, samples, equal_rows),
        *(small_steps_in_input_order, stored_in_fp8),
    ],
)
def test_plan_matches_the_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, workload: Any
) -> None:
    # Let all steps take equally long: measured times vary too much on a busy machine.
    monkeypatch.setattr("batchinfer.engine.simulate.dry_run.step_seconds", lambda *_: 1e6)
    columns, sections = workload()
    spec = job(tmp_path, model, columns, **sections)
    plan = plan_job(spec)
    assert not (tmp_path / "out").exists(), "a plan writes nothing"
    assert run_job(spec, quiet=True) == ExitCode.OK
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet").to_pydict()
    kv, tokens = summary["kv"], summary["tokens"]
    assert plan["rows_in_flight"] == pytest.approx(max(steps["num_running"]), rel=0.05)
    assert plan["peak_used_blocks"] == pytest.approx(kv["peak_used_blocks"], rel=0.05)
    assert plan["mean_waste"] == pytest.approx(np.mean(steps["kv_waste"]), abs=0.005)
    assert plan["prompt_computed"] == pytest.approx(tokens["prompt_computed"], rel=0.01)
    assert plan["preemptions"] == kv["preemptions"]
    assert plan["sharing"] == pytest.approx(summary["sharing"], rel=0.01)
    assert plan["sharing"]["distinct_tokens"] == summary["sharing"]["distinct_tokens"]
    assert plan["sharing"]["deduplicated_rows"] == (120 if workload is equal_rows else 0)
    assert plan["steps"] == pytest.approx(len(steps["step"]), rel=0.05)
    exact = {name: plan[f"{name}_tokens"] for name in ("prompt", "output")}
    assert exact == {name: tokens[name] for name in ("prompt", "output")}
    assert {name: plan[name] for name in ("num_blocks", "bytes_per_block", "block_size")} == {
        name: kv[name] for name in ("num_blocks", "bytes_per_block", "block_size")
    }


@pytest.mark.parametrize(("width", "num_blocks", "block_size"), [(4, 600, 16), (2, 150, 8)])
def test_plan_of_beam_search_is_close_to_the_run(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """The model decides which beams survive, but not how many there are or how long they are."""
    monkeypatch.setattr("batchinfer.engine.simulate.dry_run.step_seconds", lambda *_: 1e6)
    spec = job(
        tmp_path,
        model,
        {"prompt": texts(0, 24, 20, 60)},
        sampling={"max_tokens": 32, "beam_width": width, "n": 2},
        engine={"num_kv_blocks": num_blocks, "block_size": block_size},
    )
    plan = plan_job(spec)
    assert run_job(spec, quiet=True) == ExitCode.OK
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet").to_pydict()
    assert plan["rows_in_flight"] == pytest.approx(max(steps["num_running"]), rel=0.1)
    assert plan["peak_used_blocks"] == pytest.approx(summary["kv"]["peak_used_blocks"], rel=0.1)
    assert plan["mean_waste"] == pytest.approx(np.mean(steps["kv_waste"]), abs=0.02)
    assert plan["steps"] == pytest.approx(len(steps["step"]), rel=0.1)
    assert plan["prompt_computed"] == summary["tokens"]["prompt_computed"]
    assert plan["output_tokens"] == summary["tokens"]["output"] == 24 * 2 * 32


def test_plan_counts_failing_rows_like_the_run(tmp_path: Path, model: Path) -> None:
    prompts = [f"row {at}".encode() for at in range(40)]
    prompts[3], prompts[8], prompts[9] = b"  ", b"x" * 600, b"y" * 512
    prompts[15], prompts[20] = b"broken \xff here", b"as in <|im_end|> text"
    params: list[str | None] = [None] * 40
    params[30], params[31] = '{"temprature": 1}', '{"max_tokens": 400}'
    ids = [None if at == 33 else 34 if at == 35 else at for at in range(40)]
    columns = {"prompt": strings([*prompts]), "sampling_params": params, "id": ids}
    input_ = {"id_column": "id"}
    spec = job(tmp_path, model, columns, engine={"num_kv_blocks": 24}, input=input_)
    plan = plan_job(spec)
    run_job(spec, quiet=True)
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert plan["errors"] == rows["error_codes"]
    assert plan["errors"] == {
        "bad_sampling_params": 1,
        "does_not_fit": 1,
        "duplicate_id": 1,
        "empty_prompt": 1,
        "invalid_utf8": 1,
        "missing_id": 1,
        "prompt_too_long": 2,
    }
    assert (plan["rows"], plan["too_long"], plan["truncated"]) == (40, 2, 0)
    assert plan["control_text"] == rows["control_text"] == 1
    bins = {(b["min_tokens"], b["max_tokens"]): b["rows"] for b in plan["token_histogram"]}
    assert bins[512, 1023] == 2
    assert sum(bins.values()) == 40 - 5, "rows without tokens have no length"


def test_plan_needs_no_weights(tmp_path: Path, model: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    columns = {"prompt": texts(6, 20, 10, 30)}
    spec = job(tmp_path, copy, columns, engine=SWAP)
    with_weights = plan_job(job(tmp_path, model, columns, engine=SWAP))
    assert plan_job(spec) | {"model": {}} == with_weights | {"model": {}}


def test_plan_with_expected_output_tokens_is_shorter(tmp_path: Path, model: Path) -> None:
    columns = {
        "prompt": texts(7, 50, 10, 30),
        "sampling_params": [None] * 49 + ['{"min_tokens": 9}'],
    }
    spec = job(tmp_path, model, columns, sampling={"ignore_eos": False}, engine=SWAP)
    longest, shorter = plan_job(spec), plan_job(spec, expect_output_tokens=5)
    assert longest["output_tokens"] == 50 * 16
    assert shorter["output_tokens"] == 49 * 5 + 9
    assert shorter["time_s"] < longest["time_s"]
    assert plan_job(spec, expect_output_tokens=99) | {"expect_output_tokens": None} == longest


def test_plan_device_determines_the_pool(tmp_path: Path, model: Path) -> None:
    spec = job(tmp_path, model, {"prompt": ["hello"]}, engine={"num_kv_blocks": None})
    blocks = {name: plan_job(spec, device=name)["num_blocks"] for name in ("h200", "h100", "l40s")}
    assert blocks["h200"] > blocks["h100"] > blocks["l40s"]
    block_bytes = plan_job(spec, device="h200")["bytes_per_block"]
    assert blocks["h200"] * block_bytes == pytest.approx(0.9 * 139.8 * 2**30, rel=0.02)


def test_plan_simulates_no_more_blocks_than_rows_can_fill(tmp_path: Path, model: Path) -> None:
    columns = {"prompt": texts(9, 40, 60, 80)}
    engine = {"max_num_seqs": 4}
    small, large = (
        plan_job(job(tmp_path, model, columns, engine=engine | {"num_kv_blocks": blocks}))
        for blocks in (500, 200_000)  # 400 MiB of blocks, which must fit on this machine
    )
    assert large["mean_utilization"] == pytest.approx(small["mean_utilization"] / 400)
    pool = {"num_blocks": 0, "mean_utilization": 0, "num_host_blocks": 0}
    assert large | pool == small | pool


def test_plan_refuses_a_model_that_does_not_fit_the_device(tmp_path: Path, model: Path) -> None:
    spec = job(tmp_path, model, {"prompt": ["hello"]}, engine={"num_kv_blocks": 10**8})
    with pytest.raises(DeviceError, match=r"lower engine\.num_kv_blocks"):
        plan_job(spec, device="l40s")


def test_plan_for_a_device_of_another_machine(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = job(tmp_path, model, {"prompt": ["hello"]}, engine={"device": "cuda"})
    with pytest.raises(DeviceError, match="plan for another device: --device h200, h100"):
        plan_job(spec)
    assert plan_job(spec, device="a100-80g")["device"] == "NVIDIA A100 80 GB"


def test_plan_of_a_dataset_without_rows(tmp_path: Path, model: Path) -> None:
    plan = plan_job(job(tmp_path, model, {"prompt": pa.array([], pa.string())}))
    sums = ("rows", "prompt_tokens", "rows_in_flight", "peak_used_blocks", "time_s", "steps")
    assert {plan[name] for name in sums} == {0}
    assert plan["sampled"] is None
    assert list(plan_facts(plan))


def test_plan_samples_a_large_dataset(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"prompt": texts(8, 800, 20, 40)}
    rows = {"order_window": 100, "max_num_seqs": 16}
    spec = job(tmp_path, model, columns, engine=rows, output={"rows_per_part": 50})
    whole = plan_job(spec)
    assert whole["sampled"] is None
    monkeypatch.setattr("batchinfer.job.plan.plan.MAX_ROWS", 400)
    half = plan_job(spec)
    assert half["sampled"] == {
        "rows": 800,
        "rows_read": 400,
        "steps": pytest.approx(whole["steps"] / 2, rel=0.1),
        "simulated": 1.0,
    }
    monkeypatch.setattr("batchinfer.job.plan.simulation.MAX_STEPS", 150)
    less = plan_job(spec)
    assert less["sampled"]["steps"] == 150
    assert 0.2 < less["sampled"]["simulated"] < 0.6
    for plan in (half, less):
        for name in ("prompt_tokens", "prompt_computed", "time_s", "steps", "output_bytes"):
            assert plan[name] == pytest.approx(whole[name], rel=0.1), name
        assert plan["output_tokens"] == whole["output_tokens"]
    assert any(
        "estimated from a sample: 400 of 800 rows read" in line for line in plain(plan_facts(less))
    )


def test_plan_samples_whole_windows() -> None:
    parts = [Part(at, range(10 * at, min(10 * at + 10, 95))) for at in range(10)]
    assert sampled_parts(parts, window_rows=20, most_rows=95) == parts
    chosen = sampled_parts(parts, window_rows=20, most_rows=40)
    assert [part.index for part in chosen] == [0, 1, 4, 5]
    assert [part.index for part in sampled_parts(parts, window_rows=7, most_rows=30)] == [0, 3, 6]
    assert sampled_parts(parts, window_rows=1000, most_rows=30) == parts


def test_plan_command_prints_json_or_lines(tmp_path: Path, model: Path) -> None:
    write_parquet(tmp_path / "prompts.parquet", {"prompt": ["one two", "three"]})
    text = MINIMAL.replace("some/model", str(model))
    arguments = ["plan", str(write_job(tmp_path, text)), "--device", "h100", "--limit", "1"]
    plan = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    promised = """rows rows_in_flight prompt_tokens prompt_computed bytes_per_block num_blocks
        peak_used_blocks mean_waste preemptions time_s output_bytes token_histogram too_long"""
    assert set(promised.split()) <= set(plan)
    assert plan["rows"] == 1
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert len(lines) == 8
    assert lines[2].startswith("device   NVIDIA H100 SXM: weights 94.8 KiB, pool ")
    assert not (tmp_path / "out").exists()


def test_plan_workers_divide_time_but_not_cost(tmp_path: Path, model: Path) -> None:
    spec = job(tmp_path, model, {"prompt": strings(texts(3, 40, 5, 40))})
    alone = plan_job(spec, price_per_hour=3.6)
    shared = plan_job(spec, workers=4, price_per_hour=3.6)
    assert (alone["workers"], alone["wall_s"]) == (1, alone["time_s"])
    assert (shared["workers"], shared["wall_s"]) == (4, shared["time_s"] / 4)
    assert shared["cost"] == alone["cost"] == pytest.approx(alone["time_s"] * 0.001)
    assert any("on 4 devices like this one" in line for line in plain(plan_facts(shared)))


def test_plan_counts_reused_rows(tmp_path: Path, model: Path) -> None:
    prompts = texts(3, 60, 5, 40)
    sampling = {"max_tokens": 4, "temperature": 0.0}
    before = job(tmp_path, model, {"prompt": prompts[:50]}, sampling=sampling)
    assert run_job(before, quiet=True) is ExitCode.OK
    reuse = {"reuse": [before.output.path]}
    spec = job(tmp_path, model, {"prompt": prompts}, sampling=sampling, output=reuse)
    alone = plan_job(job(tmp_path / "x", model, {"prompt": prompts[50:]}, sampling=sampling))
    plan = plan_job(spec)
    assert (plan["rows"], plan["reused"], plan["why_not_reused"]) == (60, 50, [])
    for key in ("prompt_tokens", "output_tokens", "time_s"):
        assert plan[key] == pytest.approx(alone[key]), key
    assert "reused   50 rows, copied instead of computed" in plain(plan_facts(plan))

    all_of_them = job(tmp_path, model, {"prompt": prompts[:50]}, sampling=sampling, output=reuse)
    plan = plan_job(all_of_them)
    assert (plan["reused"], plan["output_tokens"], plan["steps"]) == (50, 0, 0)

    other = job(tmp_path, model, {"prompt": prompts}, sampling={"max_tokens": 5}, output=reuse)
    plan = plan_job(other)
    assert plan["reused"] == 0
    assert "prompts or sampling parameters differ" in "".join(plain(plan_facts(plan)))
