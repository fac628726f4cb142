"""Statistics of whole jobs have the columns and identities that ``docs/output.md`` defines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats import run_record
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

STEP_COLUMNS = [
    *("run_id", "step", "t_s", "step_ms", "num_running", "num_waiting", "num_swapped"),
    *("num_preempted", "prefill_tokens", "decode_tokens", "recomputed_tokens", "cached_tokens"),
    *("kv_blocks_total", "kv_blocks_used", "kv_blocks_shared", "kv_blocks_cached"),
    *("kv_tokens_live", "kv_waste", "kv_logical_blocks", "kv_tokens_logical"),
    *("state_slots_used", "contiguous_blocks", "cow_copies"),
    *("swapped_in_blocks", "swapped_out_blocks", "images", "image_tokens"),
    *("images_encoded", "encode_ms"),
    *("device_bytes", "host_rss_bytes", "worker"),
]
REQUEST_COLUMNS = [
    *("row_id", "prompt_tokens", "output_tokens", "cached_tokens", "recomputed_tokens"),
    *("preemptions", "swapped_blocks", "peak_blocks", "queue_ms", "prefill_ms", "decode_ms"),
    *("latency_ms", "swap_preemptions", "deduplicated", "distinct_tokens"),
    *("samples_tried", "samples_accepted", "samples_rejected"),
    *("samples_duplicate", "samples_surplus", "worker"),
]
SUMMARY_KEYS = {
    "rows": ["total", "ok", "error"],
    "tokens": ["prompt", "prompt_computed", "prompt_cached", "recomputed", "output"],
    "time_s": ["total", "load", "engine", "wall", "phases"],
    "throughput": ["output_tokens_per_s", "total_tokens_per_s", "rows_per_s"],
    "kv": [
        *("block_size", "num_blocks", "bytes_per_block", "peak_used_blocks", "mean_utilization"),
        *("peak_utilization", "mean_waste", "contiguous_waste", "sharing_saving"),
        *("prefix_hit_rate", "cow_copies", "preemptions", "swapped_blocks"),
        "swap_preemptions",
    ],
    "accept": [
        *("samples_tried", "samples_accepted", "samples_rejected"),
        *("samples_duplicate", "samples_surplus"),
    ],
    "out_of_memory": ["count", "max_num_batched_tokens"],
    "sharing": [
        *("prompt_tokens", "distinct_tokens", "planned_rate", "achieved_rate"),
        *("achieved_of_planned", "deduplicated_rows"),
    ],
}


class Finished:
    """The files of a finished job."""

    def __init__(self, path: Path) -> None:
        out = path / "out"
        self.steps = pq.read_table(out / "stats" / "steps.parquet")
        self.requests = pq.read_table(out / "stats" / "requests.parquet")
        self.summary: dict[str, Any] = json.loads((out / "summary.json").read_bytes())
        self.data = pq.read_table(sorted((out / "data").iterdir()))

    def total(self, table: pa.Table, column: str) -> Any:
        return pc.sum(table[column]).as_py()


def dataset(path: Path) -> None:
    """Write 40 rows with a common prefix; one is bad."""
    prompts = [f"The same instruction for every row. {row * 37 % 101}" for row in range(40)]
    prompts[11] = ""
    write_parquet(path / "in" / "x.parquet", {"prompt": prompts})


def run(path: Path, build: FakeBuild | None = None, **sections: Any) -> Finished:
    spec = job(path, errors={"max_error_rate": 1}, sampling={"max_tokens": 12}, **sections)
    assert run_job(spec, build=build or FakeBuild(), quiet=True) is ExitCode.OK
    return Finished(path)


def check_identities(job: Finished) -> None:
    """Check the identities of a job that was never interrupted."""
    check_sums(job)
    assert job.summary["tokens"]["lost"] == 0


def check_sums(job: Finished) -> None:
    tokens = job.summary["tokens"]
    within_runs = job.total(job.steps, "recomputed_tokens")
    assert tokens["recomputed"] == within_runs + tokens["lost"]
    assert tokens["prompt"] == tokens["prompt_computed"] + tokens["prompt_cached"]
    prefill = job.total(job.steps, "prefill_tokens")
    assert prefill == tokens["prompt_computed"] + tokens["recomputed"]
    assert tokens["output"] == job.total(job.data, "num_output_tokens")
    assert tokens["prompt"] == job.total(job.data, "num_prompt_tokens")


def test_summary_and_statistics_have_the_contracts_names(tmp_path: Path) -> None:
    dataset(tmp_path)
    job = run(tmp_path)
    assert job.steps.schema.names == STEP_COLUMNS
    assert job.requests.schema.names == REQUEST_COLUMNS
    for section, keys in SUMMARY_KEYS.items():
        assert set(keys) <= set(job.summary[section]), section
    assert {"model", "device", "versions", "fingerprint"} <= set(job.summary)


@pytest.mark.parametrize("num_blocks", [128, 30])
@pytest.mark.parametrize("every_steps", [1, 7])
def test_summary_token_counts_satisfy_identities(
    tmp_path: Path, num_blocks: int, every_steps: int
) -> None:
    dataset(tmp_path)
    job = run(tmp_path, FakeBuild(num_blocks), stats={"every_steps": every_steps})
    check_identities(job)
    assert (job.summary["kv"]["preemptions"] > 0) == (num_blocks == 30)


def test_summary_kv_metrics_match_their_definitions(tmp_path: Path) -> None:
    dataset(tmp_path)
    job = run(tmp_path)
    column = {
        name: job.steps[name].to_numpy() for name in job.steps.schema.names if name != "run_id"
    }
    kv, weights = job.summary["kv"], column["step_ms"]
    used = column["kv_blocks_used"]

    def mean(values: Any) -> Any:
        return pytest.approx(np.average(values, weights=weights))

    assert kv["mean_utilization"] == mean(used / 128)
    assert kv["peak_utilization"] == max(used) / 128
    assert kv["peak_used_blocks"] == max(used)
    assert kv["mean_waste"] == mean(column["kv_waste"])
    assert kv["sharing_saving"] == mean(1 - used / column["kv_logical_blocks"])
    reserved = column["contiguous_blocks"] * 4
    assert kv["contiguous_waste"] == mean(1 - column["kv_tokens_logical"] / reserved)
    tokens = job.summary["tokens"]
    assert kv["prefix_hit_rate"] == tokens["prompt_cached"] / tokens["prompt"]
    assert 0.5 < kv["prefix_hit_rate"] < 1
    time_s, throughput = job.summary["time_s"], job.summary["throughput"]
    assert time_s["total"] == pytest.approx(time_s["load"] + time_s["engine"])
    assert throughput["output_tokens_per_s"] == pytest.approx(tokens["output"] / time_s["engine"])


def test_steps_record_device_and_host_memory(tmp_path: Path) -> None:
    dataset(tmp_path)
    job = run(tmp_path)
    assert set(job.steps["device_bytes"].to_pylist()) == {12345}
    assert pc.min(job.steps["host_rss_bytes"]).as_py() > 10**7


def test_sampled_steps_keep_token_sums(tmp_path: Path) -> None:
    dataset(tmp_path)
    every = run(tmp_path)
    some = run(tmp_path, output={"if_exists": "overwrite"}, stats={"every_steps": 5})
    assert some.steps.num_rows == -(-every.steps.num_rows // 5)
    for name in ("prefill_tokens", "decode_tokens", "cached_tokens", "cow_copies"):
        assert some.total(some.steps, name) == every.total(every.steps, name)
    assert some.steps["step"][-1] == every.steps["step"][-1]


def test_summary_sums_steps_of_many_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset(tmp_path)
    whole = run(tmp_path)
    monkeypatch.setattr(run_record, "STEPS_PER_FILE", 3)
    small = run(tmp_path, output={"path": str(tmp_path / "out"), "if_exists": "overwrite"})
    check_identities(small)
    assert small.summary["tokens"] == whole.summary["tokens"]
    assert len(small.steps) == len(whole.steps)


def test_summary_merges_the_runs_of_a_job(tmp_path: Path) -> None:
    dataset(tmp_path)
    build = FakeBuild(max_num_seqs=4)
    build.before_step = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 60 else None
    engine = {"order": "input", "max_num_seqs": 4}
    spec = job(tmp_path, errors={"max_error_rate": 1}, sampling={"max_tokens": 12}, engine=engine)
    assert run_job(spec, build=build, quiet=True) is ExitCode.INTERRUPTED
    finished = run(tmp_path, engine=engine)
    assert finished.requests["row_id"].to_pylist() == [row for row in range(40) if row != 11]
    assert set(finished.steps["run_id"].to_pylist()) == {"run-00001", "run-00002"}
    check_identities(finished)
    assert finished.summary["tokens"]["recomputed"] > 0


def test_summary_identities_hold_after_a_part_is_recomputed(tmp_path: Path) -> None:
    dataset(tmp_path)
    once = run(tmp_path).summary["tokens"]
    (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
    finished = run(tmp_path)
    check_sums(finished)
    twice = finished.summary["tokens"]
    assert twice["recomputed"] > once["recomputed"] == 0
    assert (twice["prompt"], twice["output"]) == (once["prompt"], once["output"])
    assert finished.requests["row_id"].to_pylist() == [row for row in range(40) if row != 11]


def delete(path: Path) -> None:
    path.unlink()


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def empty(path: Path) -> None:
    path.write_bytes(b"{}")


def negative(path: Path) -> None:
    path.write_text(path.read_text().replace('"load_s": ', '"load_s": -'))


@pytest.mark.parametrize(
    ("harm", "name", "warnings"),
    [
        (delete, "runs/run-00001.json", 1),
        (negative, "runs/run-00001.json", 1),
        (delete, "steps/run-00001-000000.parquet", 0),
        (tear, "steps/run-00001-000000.parquet", 1),
    ],
)
def test_summary_leaves_out_damaged_statistics(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    name: str,
    warnings: int,
) -> None:
    dataset(tmp_path)
    spec = job(tmp_path, errors={"max_error_rate": 1}, sampling={"max_tokens": 12})
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
    path = tmp_path / "out" / "_batchinfer" / name
    harm(path)
    capsys.readouterr()
    assert run_job(spec, build=FakeBuild()) is ExitCode.OK
    first_line, _before, *about_damage = capsys.readouterr().err.splitlines()
    assert "rewriting part-00001" in first_line
    assert len(about_damage) == warnings
    assert all(line.startswith(f"{path} is damaged") for line in about_damage)
    assert (tmp_path / "out" / "_SUCCESS").exists()
    finished = Finished(tmp_path)
    assert finished.summary["rows"]["total"] == finished.data.num_rows == 40
    assert finished.summary["kv"]["num_blocks"] == 128


def test_rows_with_damaged_statistics_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset(tmp_path)
    once = run(tmp_path).summary["tokens"]
    (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
    tear(tmp_path / "out" / "_batchinfer" / "requests" / "part-00000.parquet")
    finished = run(tmp_path)
    check_sums(finished)
    assert finished.summary["tokens"]["prompt"] == once["prompt"]
    assert finished.requests["row_id"].to_pylist() == [row for row in range(40) if row != 11]


def test_lost_run_record_keeps_its_run_id_reserved(tmp_path: Path) -> None:
    dataset(tmp_path)
    for _ in range(2):
        finished = run(tmp_path)
        (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
    assert set(finished.steps["run_id"].to_pylist()) == {"run-00001", "run-00002"}
    for path in (tmp_path / "out" / "_batchinfer" / "runs").iterdir():
        path.unlink()
    third = run(tmp_path)
    assert set(third.steps["run_id"].to_pylist()) == {"run-00001", "run-00002", "run-00003"}
    assert third.summary["kv"]["peak_used_blocks"] > 0


def test_summary_counts_finished_parts_of_a_crashed_run(tmp_path: Path) -> None:
    dataset(tmp_path)
    build = FakeBuild(max_num_seqs=4)

    def crash(step: int) -> None:
        if step == 60:
            raise RuntimeError("bug")

    build.before_step = crash
    spec = job(tmp_path, errors={"max_error_rate": 1}, sampling={"max_tokens": 12})
    with pytest.raises(RuntimeError, match="bug"):
        run_job(spec, build=build, quiet=True)
    finished = run(tmp_path)
    assert finished.summary["rows"]["total"] == finished.data.num_rows == 40
    assert finished.summary["kv"]["num_blocks"] == 128
    assert finished.steps["run_id"][-1].as_py() == "run-00002"


def test_peak_blocks_include_steps_that_are_not_written(tmp_path: Path) -> None:
    dataset(tmp_path)
    every = run(tmp_path).summary["kv"]
    some = run(tmp_path, output={"if_exists": "overwrite"}, stats={"every_steps": 1000})
    assert some.steps.num_rows == 1
    assert some.steps["kv_blocks_used"][0].as_py() < every["peak_used_blocks"]
    for name in ("peak_used_blocks", "peak_utilization"):
        assert some.summary["kv"][name] == every[name]


def test_refused_rows_have_empty_statistics(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["b" * 100, "a"]})
    finished = run(tmp_path, FakeBuild(num_blocks=10))
    assert finished.data["num_prompt_tokens"].to_pylist() == [100, 1]
    assert finished.requests["row_id"].to_pylist() == [1]


def test_summary_of_a_job_without_rows_is_complete(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": pa.array([], pa.string())})
    summary = run(tmp_path).summary
    for section, keys in SUMMARY_KEYS.items():
        assert set(keys) <= set(summary[section]), section
    assert {summary["kv"][name] for name in SUMMARY_KEYS["kv"]} == {0}
