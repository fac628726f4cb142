"""Fleets in a program of its own: how it ends, and what it leaves on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.fleet.on_ray.ray_cluster import own_folder, ray_folder
from batchinfer.job.storage.failpoints import VARIABLE
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows

ROOT = Path(__file__).parents[3]
ROWS = 600
_GONE_S = 30.0
MARK = "BATCHINFER_TEST_OF"


@dataclass(frozen=True)
class Machine:
    """Where a program may leave something."""

    temporary: Path
    home: Path
    mark: str

    def run(self, *arguments: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
        """Run a Python program to its end."""
        environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            MARK: self.mark,
            VARIABLE: failpoint,
        }
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def processes(self) -> list[str]:
        """What was started there and still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(" ".join(process.cmdline()))
            except (psutil.Error, OSError):
                continue
        return found

    def assert_nothing_left(self) -> None:
        """No process and no file; a killed driver's processes notice within seconds."""
        until = time.monotonic() + _GONE_S
        while self._left() and time.monotonic() < until:
            time.sleep(0.1)
        assert not self._left()

    def _left(self) -> list[str]:
        found = [path for place in (self.temporary, self.home) for path in place.iterdir()]
        # torch makes a folder where it is imported, with a fleet or without one.
        files = [str(path) for path in found if not path.name.startswith("torchinductor_")]
        return [*self.processes(), *files]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    temporary = Path(tempfile.mkdtemp(dir="/tmp", prefix="bt-"))  # Ray's sockets want short paths
    home = tmp_path / "home"
    home.mkdir()
    yield Machine(temporary, home, tmp_path.name)
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.long
def test_a_fleet_leaves_nothing_running_and_no_file(tmp_path: Path, machine: Machine) -> None:
    write_rows(tmp_path, ROWS)
    done = machine.run("-m", "tests.job.fleet.program", str(tmp_path), "2")
    assert done.returncode == ExitCode.OK, done.stderr
    machine.assert_nothing_left()
    assert part_hashes(tmp_path / "out") == expected(tmp_path, fleet_job(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_driver_loses_nothing(tmp_path: Path, machine: Machine, workers: int) -> None:
    write_rows(tmp_path, ROWS)
    done = machine.run("-m", "tests.job.fleet.program", str(tmp_path), "2", "SIGKILL")
    assert done.returncode == -9, done.stderr
    machine.assert_nothing_left()
    spec = fleet_job(tmp_path, scale={"workers": workers, "min_workers": 1})
    assert run(spec) == ExitCode.OK
    assert part_hashes(tmp_path / "out") == expected(tmp_path, spec)


@pytest.mark.long
def test_a_driver_killed_between_a_part_and_its_record_loses_nothing(
    tmp_path: Path, machine: Machine
) -> None:
    write_rows(tmp_path, ROWS)
    program = ("-m", "tests.job.fleet.program", str(tmp_path), "2")
    done = machine.run(*program, failpoint="data-durable:3")
    assert done.returncode == -9, done.stderr
    assert len(list((tmp_path / "out" / "data").iterdir())) == 3
    assert machine.run(*program).returncode == ExitCode.OK
    machine.assert_nothing_left()
    assert part_hashes(tmp_path / "out") == expected(tmp_path, fleet_job(tmp_path))


@pytest.mark.long
def test_a_stopped_fleet_keeps_its_rows(tmp_path: Path, machine: Machine) -> None:
    write_rows(tmp_path, ROWS)
    done = machine.run("-m", "tests.job.fleet.program", str(tmp_path), "2", "SIGTERM")
    assert done.returncode == ExitCode.INTERRUPTED, done.stderr
    machine.assert_nothing_left()
    state = tmp_path / "out" / "_batchinfer"
    assert not list((state / "in_flight").iterdir())
    assert list((state / "segments").iterdir()) or list((state / "parts").iterdir())
    spec = fleet_job(tmp_path, scale={"workers": 1, "min_workers": 1})
    assert run(spec) == ExitCode.OK
    assert part_hashes(tmp_path / "out") == expected(tmp_path, spec)


@pytest.mark.long
def test_a_cluster_that_dies_is_begun_again(tmp_path: Path, machine: Machine) -> None:
    """Ray ends whoever has joined it then, and says so at length."""
    write_rows(tmp_path, ROWS)
    done = machine.run("-m", "tests.job.fleet.program", str(tmp_path), "2", "raylet")
    assert (done.returncode, done.stderr, done.stdout) == (ExitCode.OK, "", "")
    machine.assert_nothing_left()
    log = tmp_path / "out" / "_batchinfer" / "logs" / "run-00001-driver.log"
    assert "the Ray cluster is lost" in log.read_text()
    assert part_hashes(tmp_path / "out") == expected(tmp_path, fleet_job(tmp_path))


def test_nobody_else_gets_at_the_files_of_a_cluster() -> None:
    """Ray lets everybody write to them."""
    with own_folder() as folder:
        assert Path(folder).stat().st_mode & 0o077 == 0
        assert Path(ray_folder(folder)).parent == Path(folder)


def test_who_has_a_file_in_a_fleets_folder_goes_with_it() -> None:
    with own_folder() as folder, (Path(folder) / "log").open("w") as log:
        process = subprocess.Popen(["sleep", "600"], stdout=log)
    assert process.poll() == -9
    assert not Path(folder).exists()


def test_one_worker_never_imports_ray(tmp_path: Path, machine: Machine) -> None:
    write_rows(tmp_path, 50)
    look = (
        "import sys; from pathlib import Path; from tests.job.fleet.jobs import *;"
        f"spec = fleet_job(Path({str(tmp_path)!r}), scale={{'workers': 1, 'min_workers': 1}});"
        "assert run(spec) == 0; assert 'ray' not in sys.modules"
    )
    done = machine.run("-c", look)
    assert done.returncode == 0, done.stderr
