"""Fleets whose workers do not share a disk with their driver: in a store, and by the driver."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.fleet import driver, run_fleet
from batchinfer.job.fleet.boot import WorkerSetup
from batchinfer.job.fleet.files import inbox
from batchinfer.job.fleet.messages import Answer, Wanted
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage import connection
from tests.job.fleet.engines import Dies, how_often
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows
from tests.job.fleet.shared_cluster import shared_cluster
from tests.job.stores import LAKE, objects, point_to, s3_server

ROWS = 600


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all jobs here, whose processes know the store."""
    with pytest.MonkeyPatch.context() as patch, s3_server() as address:
        point_to(address, patch)
        with shared_cluster(2):
            yield
    connection.connect.cache_clear()


def test_a_fleet_writes_to_a_store_and_workers_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    spec = fleet_job(tmp_path, output={"path": f"{LAKE}/fleet/out"})
    assert run(spec, Dies(tmp_path, times=2)) == ExitCode.OK
    assert how_often(tmp_path, "death") == 2
    alone = expected(tmp_path, spec)
    data = {path: (tmp_path / "alone" / "data" / path).read_bytes() for path in alone}
    assert objects("fleet/out/data") == data
    assert verify(output_at(spec.output.path)).complete
    left = [name for name in objects("fleet/out") if name.startswith("_batchinfer/")]
    kinds = {name.split("/")[1] for name in left}
    assert not kinds & {"segments", "staging", "in_flight", "locks"}, left
    log = objects("fleet/out/_batchinfer/logs")["run-00001-driver.log"].decode()
    assert log.count("is gone") == 2
    assert "workers are asked for" in log


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where workers look for the output, and do not find it."""
    path = tmp_path / "elsewhere" / "out"

    def setup(spec: JobSpec, *values: Any, **named: Any) -> WorkerSetup:
        output = spec.output.model_copy(update={"path": str(path)})
        return WorkerSetup(spec.model_copy(update={"output": output}), *values, **named)

    monkeypatch.setattr(run_fleet, "WorkerSetup", setup)
    return path.parent


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_on_other_disks_that_end_lose_nothing(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    write_rows(tmp_path, ROWS)
    spec, read = fleet_job(tmp_path), list[Wanted]()

    def read_wanted(out: OutputDir, wanted: Wanted) -> Answer:
        read.append(wanted)
        return inbox.read_wanted(out, wanted)

    monkeypatch.setattr(driver, "read_wanted", read_wanted)
    assert run(spec, Dies(tmp_path, times=2, number=number)) == ExitCode.OK
    assert how_often(tmp_path, "death") == 2
    assert not elsewhere.exists()
    assert part_hashes(tmp_path / "out") == expected(tmp_path, spec)
    assert verify(output_at(spec.output.path)).complete
    state = tmp_path / "out" / "_batchinfer"
    for name in ("segments", "staging", "in_flight"):
        assert not list((state / name).iterdir()), name
    log = (state / "logs" / "run-00001-driver.log").read_text()
    assert log.count("whose files come by the driver") == log.count(" is up on ") > 2
    if number == signal.SIGTERM:
        assert read, "what was on disk of one worker's is asked for by another"
