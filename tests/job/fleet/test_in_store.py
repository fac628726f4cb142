"""A fleet whose workers write to an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.storage import connection
from tests.job.fleet.engines import Dies, how_often
from tests.job.fleet.jobs import expected, fleet_job, run, write_rows
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
