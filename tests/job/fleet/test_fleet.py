"""Fleets on this machine write the same bytes as one process, even if workers die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import psutil
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DeviceError, ExitCode, UsageError
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.fleet.run_fleet import is_reachable
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.storage.failpoints import VARIABLE
from batchinfer.process import cpus
from tests.job.fleet.engines import Disturbed
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows

ROWS = 600
pytestmark = pytest.mark.long


def check_bytes(folder: Path) -> None:
    """Check that the output equals that of one process, and that no temporary files are left."""
    spec = fleet_job(folder)
    assert part_hashes(folder / "out") == expected(folder, spec)
    assert not verify(output_at(spec.output.path)).problems
    state = folder / "out" / "_batchinfer"
    for name in ("segments", "tokens", "in_flight", "claims"):
        assert not list((state / name).glob("*")), name


def log_of(folder: Path) -> str:
    (path,) = (folder / "out" / "_batchinfer" / "logs").glob("*-launcher.log")
    return path.read_text()


def test_two_workers_give_the_bytes_of_one_process(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path)) == ExitCode.OK
    check_bytes(tmp_path)
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert summary["rows"]["total"] == ROWS
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")
    assert set(steps["worker"].to_pylist()) <= {"w01", "w02"}


def check_updated(folder: Path) -> None:
    """Check that the update has reused all rows of the old output, and has replaced it."""
    check_bytes(folder)
    summary = json.loads((folder / "out" / "summary.json").read_bytes())
    assert summary["rows"]["reused"] == ROWS
    state = folder / "out" / "_batchinfer"
    assert not any((state / name).exists() for name in ("next", "swap.json"))


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """Return a folder with a finished output, whose input has grown since."""
    write_rows(tmp_path, ROWS)
    alone = fleet_job(tmp_path, scale={"workers": 1, "min_workers": 1})
    assert run(alone) == ExitCode.OK
    write_rows(tmp_path, ROWS + 200)
    return tmp_path


def test_update_by_workers_runs_only_new_rows_though_one_is_killed(grown: Path) -> None:
    build = Disturbed(grown, "SIGKILL", at=3)
    assert run(fleet_job(grown), build, update=True) == ExitCode.OK
    assert (grown / build.name).exists(), "no worker was killed"
    check_updated(grown)


@pytest.mark.parametrize(
    ("words", "failpoint", "is_swapping", "workers"),
    [(["SIGKILL"], "", False, 2), (["SIGKILL"], "", False, 1), ([], "swap-copied:9", True, 2)],
)
def test_update_is_resumed_after_its_launcher_was_killed(
    grown: Path, words: list[str], failpoint: str, is_swapping: bool, workers: int
) -> None:
    before = part_hashes(grown / "out")
    killed = program(grown, "2", *words, "update", **{VARIABLE: failpoint})
    assert killed.wait() == -signal.SIGKILL
    state = grown / "out" / "_batchinfer"
    (generation,) = (state / "next").iterdir()
    assert (state / "swap.json").exists() is is_swapping
    assert is_swapping or part_hashes(grown / "out") == before
    _, alive = psutil.wait_procs(workers_of(generation), timeout=30)
    assert not alive
    again = fleet_job(grown, scale={"workers": workers, "min_workers": 1})
    assert run(again, update=True) == ExitCode.OK
    check_updated(grown)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "bug"])
def test_dead_worker_is_replaced(tmp_path: Path, how: str) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path), Disturbed(tmp_path, how)) == ExitCode.OK
    assert "worker 1 ended: " in log_of(tmp_path) or "worker 2 ended: " in log_of(tmp_path)
    check_bytes(tmp_path)


def test_worker_with_failed_device_is_not_replaced(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path), Disturbed(tmp_path, "device")) == ExitCode.OK
    assert log_of(tmp_path).count(" is running on ") == 2
    check_bytes(tmp_path)


def test_row_that_kills_workers_becomes_an_error_row_until_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 200)
    monkeypatch.setenv(VARIABLE, "row-77:1")
    assert run(fleet_job(tmp_path)) == ExitCode.OK, "few rows failed"
    monkeypatch.delenv(VARIABLE)
    rows = [
        row
        for path in sorted((tmp_path / "out" / "data").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]
    assert [row["row_id"] for row in rows] == list(range(200))
    assert [row["row_id"] for row in rows if row["status"] == "error"] == [77]
    assert run(fleet_job(tmp_path), retry_errors=True) == ExitCode.OK
    check_bytes(tmp_path)


def test_job_fails_if_no_worker_can_start(tmp_path: Path) -> None:
    write_rows(tmp_path, 10)
    with pytest.raises(DeviceError, match="no worker is running: there is no such device"):
        run(fleet_job(tmp_path), Disturbed(tmp_path, never=True))


def test_all_workers_use_the_first_workers_kernels(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path), Disturbed(tmp_path, kernels=True)) == ExitCode.OK
    assert "reloads the model" in log_of(tmp_path)
    runs = (tmp_path / "out" / "_batchinfer" / "runs").iterdir()
    assert {json.loads(path.read_bytes())["kernels"]["float32"] for path in runs} == {"fast"}


def test_shards_by_two_workers_each_give_the_bytes_of_one_process(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    shards = [program(tmp_path, "2", f"{index}/2") for index in range(2)]
    assert [shard.wait() for shard in shards] == [ExitCode.OK, ExitCode.OK]
    assert all((tmp_path / Shard(index, 2).writer).exists() for index in range(2)), "none killed"
    check_bytes(tmp_path)


def test_shard_is_resumed_after_its_launcher_was_killed(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    killed = program(tmp_path, "2", "0/2", "SIGKILL")
    assert killed.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers_of(tmp_path / "out"), timeout=30)
    assert not alive
    assert run(fleet_job(tmp_path), role=Role(Shard(0, 2))) == ExitCode.OK
    assert len(part_hashes(tmp_path / "out")) == 5, "no part of the other shard"
    alone = fleet_job(tmp_path, scale={"workers": 1, "min_workers": 1})
    assert run(alone, role=Role(Shard(1, 2))) == ExitCode.OK
    check_bytes(tmp_path)


def program(folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
    words = ["-m", "tests.job.fleet.program", str(folder), *arguments]
    return subprocess.Popen([sys.executable, *words], env={**os.environ, **environ})


def workers_of(out: Path) -> list[psutil.Process]:
    """Return the worker processes that write to an output or to a generation of it."""
    holders = (out / "_batchinfer" / "locks").glob("*w[0-9]*.json")
    pids = [json.loads(path.read_bytes())["pid"] for path in holders]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(("workers", "again"), [("2", 1), ("1", 2), ("2", 3)])
def test_killed_launcher_loses_no_rows_and_leaves_no_process(
    tmp_path: Path, workers: str, again: int
) -> None:
    write_rows(tmp_path, ROWS)
    killed = program(tmp_path, workers, "SIGKILL")
    assert killed.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers_of(tmp_path / "out"), timeout=30)
    assert not alive
    assert run(fleet_job(tmp_path, scale={"workers": again, "min_workers": 1})) == ExitCode.OK
    check_bytes(tmp_path)


def test_stopped_fleet_keeps_finished_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert program(tmp_path, "2", "SIGTERM").wait() == ExitCode.INTERRUPTED
    assert not workers_of(tmp_path / "out")
    assert run(fleet_job(tmp_path)) == ExitCode.OK
    check_bytes(tmp_path)


def test_overwrite_with_workers_deletes_old_output_once(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    for _ in range(2):
        assert run(fleet_job(tmp_path), overwrite=True) == ExitCode.OK
        check_bytes(tmp_path)


@pytest.fixture
def unused_address() -> Iterator[str]:
    """Return an address with a port that no process listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        host, port = bound.getsockname()
        yield f"{host}:{port}"


def test_unreachable_ray_cluster_is_named(
    unused_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"cannot reach the Ray cluster {unused_address} within scale.start_timeout"
    with pytest.raises(DeviceError, match=message):
        is_reachable(unused_address, 0.5, Event())
    monkeypatch.setenv("RAY_ADDRESS", unused_address)
    with pytest.raises(DeviceError, match=message):
        is_reachable("auto", 0.5, Event())


def test_many_more_workers_than_cores_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 10)
    count = 2 * cpus.cpu_limits().count + 1
    with pytest.raises(UsageError, match=rf"scale\.workers is {count}"):
        run(fleet_job(tmp_path, scale={"workers": count, "min_workers": 1}))
