"""Clusters that do not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from batchinfer.errors import DeviceError, ExitCode, UsageError
from batchinfer.job.fleet.on_ray.ray_main import ToJoin
from batchinfer.job.fleet.on_ray.ray_process import ray_process
from batchinfer.job.fleet.on_ray.reach import is_reached
from tests.job.fleet.jobs import fleet_job, run, write_rows

ROOT = Path(__file__).parents[3]


@pytest.fixture
def place() -> Iterator[socket.socket]:
    """A port of this machine that nothing listens at."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def address(place: socket.socket) -> str:
    """The place as a cluster's."""
    host, port = place.getsockname()
    return f"{host}:{port}"


def test_a_place_where_nothing_listens(place: socket.socket) -> None:
    with pytest.raises(DeviceError, match=rf"{address(place)} cannot be reached.*start_timeout"):
        is_reached(address(place), 0.5, Event())


def test_the_clusters_place_as_the_environment_names_it(
    place: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address(place))
    with pytest.raises(DeviceError, match=rf"{address(place)} cannot be reached"):
        is_reached("auto", 0.5, Event())


@pytest.mark.long
def test_a_place_that_is_no_cluster(place: socket.socket) -> None:
    place.listen()
    assert is_reached(address(place), 0.5, Event())
    with (
        ray_process(ToJoin(address(place), 1), 0.5, Event()) as workers,
        pytest.raises(DeviceError, match=r"has not answered within scale\.start_timeout"),
    ):
        workers.join(0.5)


def test_a_cluster_that_does_not_come_up_is_waited_for_as_long_as_the_job_says(
    tmp_path: Path, place: socket.socket
) -> None:
    write_rows(tmp_path, 50)
    place.listen()
    spec = fleet_job(tmp_path, scale={"cluster": address(place), "start_timeout": "0.5s"})
    with pytest.raises(DeviceError, match=r"has not answered within scale\.start_timeout"):
        run(spec)


def test_many_more_engines_than_cores_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, 50)
    with pytest.raises(UsageError, match=r"scale\.workers is 1000, and .* cores"):
        run(fleet_job(tmp_path, scale={"workers": 1000}))


@pytest.mark.long
def test_a_signal_ends_a_job_that_waits_for_its_cluster(
    tmp_path: Path, place: socket.socket
) -> None:
    write_rows(tmp_path, 50)
    place.listen()
    run = (
        "import sys; from pathlib import Path; from tests.job.fleet.jobs import *;"
        f"spec = fleet_job(Path({str(tmp_path)!r}), scale={{'cluster': {address(place)!r}}});"
        "sys.exit(int(run(spec)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", run], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as program:
        place.accept()[0].close()
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=60) == ExitCode.INTERRUPTED
