"""Fleets whose workers, or whose drivers, are killed at random times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Event, Thread

from batchinfer.errors import ExitCode
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from tests.faults.violation import ViolationError
from tests.job.fakes import FakeBuild, FakeBuilt, drawn
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows
from tests.job.fleet.shared_cluster import shared_cluster

ROWS = 2000
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Paced:
    """Builds engines whose steps take some time, and that say which processes they are in."""

    folder: Path
    step_s: float = 0.02

    def __call__(self, model: object, engine: object, *, log: Callable[[str], None]) -> FakeBuilt:
        (self.folder / f"pid-{os.getpid()}").touch()
        build = FakeBuild(next_token=drawn)
        build.before_step = self._before_step
        return build(model, engine, log=log)

    def _before_step(self, number: int) -> None:
        time.sleep(self.step_s)


def workers_killed(folder: Path, kills: int, seed: int) -> int:
    """Kill workers at random times, in as many jobs as that takes.

    Returns:
        How many jobs there were.

    Raises:
        ViolationError: the output of one is not what one process gives.
    """
    random, done, jobs = Random(seed), 0, 0
    with shared_cluster(2):
        while done < kills:
            place = folder / f"job-{jobs}"
            place.mkdir(parents=True)
            write_rows(place, ROWS)
            over = Event()
            killer = _Killer(place, random, kills - done, over)
            killer.start()
            code = run(fleet_job(place), Paced(place))
            over.set()
            killer.join()
            _check(place, code)
            done, jobs = done + killer.done, jobs + 1
    return jobs


class _Killer(Thread):
    """Kills one of a job's workers now and then."""

    def __init__(self, folder: Path, random: Random, most: int, over: Event) -> None:
        super().__init__(daemon=True)
        self.done = 0
        self._folder = folder
        self._random = random
        self._most = most
        self._over = over

    def run(self) -> None:
        while self.done < self._most and not self._over.wait(self._random.uniform(0.2, 3.0)):
            pids = [int(path.name.removeprefix("pid-")) for path in self._folder.glob("pid-*")]
            if pids:
                pid = self._random.choice(pids)
                (self._folder / f"pid-{pid}").unlink()
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.done += 1


def drivers_killed(folder: Path, kills: int, seed: int) -> int:
    """Kill drivers at random times; each job goes on with another number of workers.

    Returns:
        How many jobs there were.

    Raises:
        ViolationError: the output of one is not what one process gives.
    """
    random, done, jobs = Random(seed), 0, 0
    while done < kills:
        place = folder / f"job-{jobs}"
        place.mkdir(parents=True)
        write_rows(place, ROWS)
        code = None
        while code is None:
            program = ["-m", "tests.job.fleet.program", str(place), str(random.choice((1, 2, 3)))]
            process = subprocess.Popen([sys.executable, *program], cwd=ROOT)
            try:
                wait_s = random.uniform(3.0, 20.0) if done < kills else None
                code = process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                done += 1
        _check(place, code)
        jobs += 1
    return jobs


def _check(folder: Path, code: int) -> None:
    spec = fleet_job(folder)
    if code != ExitCode.OK:
        raise ViolationError(f"{folder} ended with {code}")
    if part_hashes(folder / "out") != expected(folder, spec):
        raise ViolationError(f"{folder} has other bytes than one process gives")
    if problems := verify(output_at(spec.output.path)).problems:
        raise ViolationError(f"{folder}: {problems}")
