"""Statistics of runs that take place at the same time."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.claims.writers import Writer, own_lock
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.open import output_at
from batchinfer.job.output.stats_tables import STEPS_SCHEMA
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats.latest_runs import SILENT_S, latest_workers
from batchinfer.job.stats.run_record import Run, engine_wall_s, wall_s
from batchinfer.job.stats.status import read_status
from batchinfer.report.stored_stats import read_timeline
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

KV = {"num_blocks": 4, "block_size": 16, "bytes_per_block": 1}


def run(run_id: str, saved_at: float, total_s: float, load_s: float = 0.0) -> Run:
    return Run(run_id, {}, kv=KV, load_s=load_s, total_s=total_s, saved_at=saved_at, rows=1)


def test_wall_time_is_the_union_of_the_runs_intervals() -> None:
    runs = [
        run("run-00001", 1000.0, 30.0, load_s=10.0),
        run("run-00002", 7.0, 5.0),  # the clock was set back
        run("run-00003-s0000of3", 2010.0, 10.0, load_s=4.0),
        run("run-00003-s0001of3", 2015.0, 10.0, load_s=1.0),
        run("run-00004-s0002of3", 2008.0, 2.0),
        run("run-00005-s0002of3", 3001.0, 1.0),
    ]
    assert wall_s(runs) == 30.0 + 5.0 + 15.0 + 1.0
    assert engine_wall_s(runs) == 20.0 + 5.0 + 11.0 + 1.0
    assert wall_s([]) == 0.0


def test_timeline_overlaps_concurrent_runs_and_skips_idle_time(tmp_path: Path) -> None:
    runs = [
        run("run-00001", 500.0, 4.0),
        run("run-00002-s0000of2", 2010.0, 10.0),
        run("run-00002-s0001of2", 2015.0, 10.0),
        run("run-00003-s0000of2", 9000.0, 5.0),
    ]
    nothing = dict.fromkeys(STEPS_SCHEMA.names, 0)
    for each in runs:
        step = {"run_id": each.run_id, "t_s": each.engine_s, "worker": ""}
        each.unsampled = {**nothing, **step}
    assert read_timeline(OutputDir(tmp_path), [], runs, merged=False).span_s == 4.0 + 15.0 + 5.0


@pytest.mark.parametrize(
    ("run_ids", "latest"),
    [
        (["run-00001-s0000of2", "run-00002"], [""]),
        (["run-00001", "run-00002-s0001of2", "run-00003-s0001of2"], ["s0001of2"]),
        (["run-00001-s0001of2", "run-00002-s0000of2"], ["s0000of2", "s0001of2"]),
        (["run-00001-s0001of4", "run-00002", "run-00003-s0000of4"], ["s0000of4"]),
        (["run-00001-w01", "run-00001-w02", "run-00001-w03"], ["w01", "w02", "w03"]),
        (["run-00001-w01", "run-00001-w02", "run-00002-w01"], ["w01", "w02"]),
    ],
)
def test_status_lists_the_runs_of_the_latest_group(
    tmp_path: Path, run_ids: list[str], latest: list[str]
) -> None:
    runs = [run(run_id, 100.0, 1.0) for run_id in run_ids]
    workers = latest_workers(OutputDir(tmp_path), runs, 100.0)
    assert [worker.worker for worker in workers] == latest


def test_status_leaves_out_stopped_workers_of_earlier_fleets(tmp_path: Path) -> None:
    runs = [
        run("run-00001-w01", 100.0, 50.0),
        run("run-00001-w02", 90.0, 40.0),
        run("run-00001-w03", 100.0, 50.0),
        run("run-00002-w01", 1000.0, 100.0),
        run("run-00002-w02", 950.0, 50.0),  # died, but ran at the same time as w01
    ]
    workers = latest_workers(OutputDir(tmp_path), runs, 2000.0)
    assert [(worker.worker, worker.saved_at) for worker in workers] == [
        ("w01", 1000.0),
        ("w02", 950.0),
    ]
    shards = [run(f"run-0000{n}-s000{n}of3", 1000.0 * n, 10.0) for n in range(3)]
    assert len(latest_workers(OutputDir(tmp_path), shards, 9000.0)) == 3


def test_status_and_statistics_of_shards(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": [f"{row} asks" for row in range(40)]})
    spec = job(tmp_path)
    out = output_at(spec.output.path)
    assert run_job(spec, role=Role(Shard(0, 2)), build=FakeBuild(), quiet=True) is ExitCode.OK
    found = read_status(out, 0.0)
    assert (found.state, found.rows_done, found.parts_done) == ("stopped", 20, 2)
    with own_lock(out, Writer(Shard(1, 2))).locked():
        assert read_status(out, 0.0).state == "running", "a worker that loads its model is running"
        path = out.runs / "run-00002-s0001of2.json"
        stored = json.loads((out.runs / "run-00001-s0000of2.json").read_bytes())
        living = {"run_id": path.stem, "ended": False, "rows": 3, "saved_at": 1e6}
        out.write_json(path, {**stored, **living})
        found = read_status(out, 1e6)
        one, two = found.workers
        assert (one.worker, one.state, one.rows, one.pool_use) == ("s0000of2", "ended", 20, None)
        assert (two.worker, two.state, two.rows) == ("s0001of2", "running", 3)
        assert found.rows_per_s == two.rows_per_s
        assert found.eta_s == pytest.approx(20 / (two.rows_per_s or 0.0))
        assert ", 1 of 2 workers running" in "\n".join(found.lines())
        assert "s0001of2 running, 3 rows" in " ".join("\n".join(found.lines()).split())
        assert read_status(out, 1e6 + SILENT_S).workers[1].state == "stopped"
    assert read_status(out, 1e6).workers[1].state == "running", "the lock's holder is unknown"
    Path(path).unlink()

    assert run_job(spec, role=Role(Shard(1, 2)), build=FakeBuild(), quiet=True) is ExitCode.OK
    assert read_status(out, 0.0).state == "finished"
    summary = json.loads(Path(out.summary).read_bytes())
    assert summary["workers"] == 2
    time_s, tokens = summary["time_s"], summary["tokens"]["output"]
    assert time_s["wall"] <= time_s["total"] * 1.001
    runs = [Run(**json.loads(path.read_bytes())) for path in sorted(Path(out.runs).iterdir())]
    speed = summary["throughput"]["output_tokens_per_s"]
    assert speed == pytest.approx(tokens / engine_wall_s(runs))
    requests = pq.read_table(out.stats / "requests.parquet")
    made_by = dict(zip(requests["row_id"].to_pylist(), requests["worker"].to_pylist(), strict=True))
    assert made_by == {row: f"s{row // 20:04d}of2" for row in range(40)}
    steps = pq.read_table(out.stats / "steps.parquet")
    assert pc.all(pc.ends_with(steps["run_id"], "of2")).as_py()
    assert set(steps["worker"].to_pylist()) == {"s0000of2", "s0001of2"}


def test_summary_keeps_step_statistics_without_worker_column(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": [f"{row} asks" for row in range(40)]})
    spec = job(tmp_path)
    run_job(spec, build=FakeBuild(), quiet=True)
    before = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert before["workers"] == 1
    state = tmp_path / "out" / "_batchinfer"
    for path in (state / "steps").iterdir():
        pq.write_table(pq.read_table(path).drop_columns("worker"), path)
    (tmp_path / "out" / "_SUCCESS").unlink()
    run_job(spec, build=FakeBuild(), quiet=True)
    after = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert (after["tokens"], after["kv"]) == (before["tokens"], before["kv"])
