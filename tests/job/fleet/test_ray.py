"""Workers on the nodes of a Ray cluster; actors start the processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchinfer.errors import ExitCode
from batchinfer.process.process import SIGNALS
from tests.job.fleet.engines import Disturbed
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start a Ray cluster here and connect this process; return the cluster's address."""
    ray = pytest.importorskip("ray")
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    settings = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    joined = ray.init(address="local", configure_logging=False, log_to_driver=False, **settings)
    yield joined.address_info["gcs_address"]
    ray.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("how", ["", "SIGKILL"])
def test_workers_on_nodes_give_the_bytes_of_one_process(
    tmp_path: Path, cluster: str, how: str
) -> None:
    write_rows(tmp_path, 600)
    spec = fleet_job(tmp_path, scale={"cluster": cluster})
    assert run(spec, Disturbed(tmp_path, how)) == ExitCode.OK
    assert part_hashes(tmp_path / "out") == expected(tmp_path, spec)
