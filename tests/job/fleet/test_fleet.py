"""Fleets on Ray on this machine: whatever happens to workers, the bytes of one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DeviceError, ExitCode, LockedError
from batchinfer.job.fleet import dispatcher
from batchinfer.job.fleet.messages import Failure
from batchinfer.job.fleet.on_ray import ray_workers
from batchinfer.job.fleet.workers import Gone, WorkerEvent
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from tests.job.datasets import write_parquet
from tests.job.fleet.engines import Breaks, Dies, DiesAt, DiesOf, Freezes, how_often, never_built
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows
from tests.job.fleet.shared_cluster import shared_cluster

ROWS = 600


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all jobs here."""
    with shared_cluster(4):
        yield


def assert_as_of_one_process(folder: Path) -> None:
    """The output is whole, the bytes are those of one process, and nothing else is left."""
    spec = fleet_job(folder)
    assert part_hashes(folder / "out") == expected(folder, spec)
    assert not verify(output_at(spec.output.path)).problems
    state = folder / "out" / "_batchinfer"
    for name in ("segments", "tokens", "staging", "in_flight"):
        assert not list((state / name).glob("*")), name
    assert not (state / "locks" / "fleet").exists()


def test_two_workers_give_the_bytes_of_one_process(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path)) == ExitCode.OK
    assert_as_of_one_process(tmp_path)
    runs = sorted(path.name for path in (tmp_path / "out/_batchinfer/runs").iterdir())
    assert runs == ["run-00001-w01.json", "run-00001-w02.json"]


@pytest.mark.long
def test_an_update_runs_what_is_new_and_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path, scale={"workers": 1, "min_workers": 1})) == ExitCode.OK
    write_rows(tmp_path, ROWS + 20)
    assert run(fleet_job(tmp_path), Dies(tmp_path, times=1), update=True) == ExitCode.OK
    assert_as_of_one_process(tmp_path)
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["rows"]["reused"] == ROWS
    assert not (tmp_path / "out" / "_batchinfer" / "next").exists()


def test_a_job_with_fewer_rows_than_a_part_is_shared(tmp_path: Path) -> None:
    write_rows(tmp_path, 60)
    assert run(fleet_job(tmp_path, engine={"max_num_seqs": 2})) == ExitCode.OK
    assert_as_of_one_process(tmp_path)


def test_workers_go_by_the_ids_that_the_driver_has_seen(tmp_path: Path) -> None:
    rows = {"prompt": [f"row {row % 150}" for row in range(300)]}
    write_parquet(tmp_path / "in" / "rows.parquet", rows)
    sections = {"input": {"id_column": "prompt"}, "errors": {"max_error_rate": 0.5}}
    assert run(fleet_job(tmp_path, **sections)) == ExitCode.OK
    table = pq.read_table(sorted((tmp_path / "out" / "data").iterdir()))
    codes = [error and error["code"] for error in table["error"].to_pylist()]
    assert codes == [*[None] * 150, *["duplicate_id"] * 150]


def test_workers_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path), Dies(tmp_path, times=3)) == ExitCode.OK
    assert how_often(tmp_path, "death") == 3
    assert_as_of_one_process(tmp_path)


def test_a_worker_that_is_told_to_go_puts_its_rows_on_disk(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path), Dies(tmp_path, 1, number=signal.SIGTERM)) == ExitCode.OK
    log = tmp_path / "out" / "_batchinfer" / "logs" / "run-00001-driver.log"
    assert "has ended: it was told to stop" in log.read_text()
    assert_as_of_one_process(tmp_path)
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    tokens = summary["tokens"]
    assert summary["kv"]["preemptions"] == 0
    assert tokens["recomputed"] > tokens["lost"], "others went on with the tokens of its rows"


@pytest.mark.long
@pytest.mark.parametrize(
    "point", ["segments-durable", "steps-renamed", "draft-staged", "draft-told"]
)
def test_a_worker_that_dies_at_a_step_of_a_commit_loses_nothing(tmp_path: Path, point: str) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path), DiesAt(tmp_path, point)) == ExitCode.OK
    log = tmp_path / "out" / "_batchinfer" / "logs" / "run-00001-driver.log"
    assert " is gone: " in log.read_text()
    assert_as_of_one_process(tmp_path)


def test_a_worker_with_a_bug_is_replaced(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert run(fleet_job(tmp_path), Breaks(tmp_path)) == ExitCode.OK
    assert how_often(tmp_path, "bug") == 1
    state = tmp_path / "out" / "_batchinfer"
    log = (state / "logs" / "run-00001-driver.log").read_text()
    assert "has ended: ZeroDivisionError('a bug of this test')" in log
    assert_as_of_one_process(tmp_path)


@pytest.mark.long
def test_a_row_that_kills_its_worker_is_given_up_and_no_other(tmp_path: Path) -> None:
    write_rows(tmp_path, 300)
    spec = fleet_job(tmp_path, errors={"max_error_rate": 0.5})
    assert run(spec, DiesOf(b"row 77 ", tmp_path)) == ExitCode.OK
    rows = [
        row
        for path in sorted((tmp_path / "out" / "data").iterdir())
        for row in pq.read_table(path).to_pylist()
    ]
    assert [row["row_id"] for row in rows] == list(range(300))
    failed = [(row["row_id"], row["error"]["code"]) for row in rows if row["error"]]
    assert failed == [(77, "crashed_engine")]


class Unreachable(ray_workers.RayWorkers):
    """A fleet whose first worker that is given up goes on, and what it tells comes late."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ghost = ""
        self._is_closing = False

    def close(self) -> None:
        self._is_closing = True
        super().close()

    def _end_process(self, worker: str) -> None:
        self._ghost = self._ghost or worker
        if self._is_closing or worker != self._ghost:
            super()._end_process(worker)

    def _failed(self, worker: str, failure: Failure) -> WorkerEvent:
        if self._is_closing or worker != self._ghost:
            return super()._failed(worker, failure)
        return Gone(worker, failure.text)


@pytest.mark.long
def test_what_a_frozen_worker_tells_when_it_thaws_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "SILENT_S", 3.0)
    monkeypatch.setattr(ray_workers, "REPORT_S", 0.5)
    monkeypatch.setattr(ray_workers, "RayWorkers", Unreachable)
    write_rows(tmp_path, ROWS)
    log = tmp_path / "out" / "_batchinfer" / "logs" / "run-00001-driver.log"

    def has_told(line: str) -> bool:
        return log.exists() and line in log.read_text()

    def wait_for(line: str) -> None:
        until = time.monotonic() + 60
        while not has_told(line) and time.monotonic() < until:
            time.sleep(0.05)

    def thaw() -> None:
        wait_for("is gone: it was killed")
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)
        wait_for("is refused: it comes too late")
        (tmp_path / "go-on").touch()

    Thread(target=thaw, daemon=True).start()
    # Cores are not dealt to workers then: the one that is frozen keeps its own.
    spec = fleet_job(tmp_path, engine={"num_threads": 1})
    assert run(spec, Freezes(tmp_path)) == ExitCode.OK
    assert has_told("is refused: it comes too late")
    assert_as_of_one_process(tmp_path)


def test_no_worker_can_be_started(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    with pytest.raises(DeviceError, match="too small for this test"):
        run(fleet_job(tmp_path), never_built)


@pytest.mark.long
def test_what_is_overwritten_stays_until_a_model_is_loaded(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    spec = fleet_job(tmp_path)
    assert run(spec) == ExitCode.OK
    before = part_hashes(tmp_path / "out")
    with pytest.raises(DeviceError, match="too small for this test"):
        run(spec, never_built, overwrite=True)
    assert part_hashes(tmp_path / "out") == before
    assert run(spec, overwrite=True) == ExitCode.OK
    assert_as_of_one_process(tmp_path)


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    spec = fleet_job(tmp_path)
    with output_at(spec.output.path).locked(), pytest.raises(LockedError, match="another run"):
        run(spec)
