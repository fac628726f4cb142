"""Fleets whose workers or launchers are killed at random times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Event, Thread

import psutil

from batchinfer.errors import ExitCode
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.spec.spec import JobSpec
from tests.faults.violation import ViolationError
from tests.job.fleet.engines import Paced
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows

ROWS = 2000
ROOT = Path(__file__).parents[2]


@dataclass
class Killed:
    """What a number of kills came to."""

    jobs: int = 0
    again: list[float] = field(default_factory=list)
    """Of each kill: seconds between the first finished row that it lost and the kill."""
    rows_again: int = 0
    """Finished rows that were computed again, in all."""

    def note(self, folder: Path, kills: dict[int, float]) -> None:
        """Count what a job has done again that has ended.

        Args:
            folder: where ``Paced`` engines told what they finished.
            kills: processes of such engines that were killed, and when.
        """
        finished = {_pid(path): _finished(path) for path in folder.glob("pid-*")}
        for pid, at in kills.items():
            later = {
                row
                for rows in finished.values()
                for row, when in rows.items()
                if when > at and rows is not finished[pid]
            }
            lost = [when for row, when in finished[pid].items() if row in later]
            self.again.append(at - min(lost, default=at))
            self.rows_again += len(lost)


def workers_killed(folder: Path, kills: int, seed: int) -> Killed:
    """Kill workers at random times, in as many jobs as that takes.

    Raises:
        ViolationError: the output of one is not what one process gives.
    """
    random, killed = Random(seed), Killed()
    while len(killed.again) < kills:
        place = _place(folder, killed.jobs)
        killer = _Killer(place, random, kills - len(killed.again), os.kill)
        _run_job(place, fleet_job(place), killer, killed)
    return killed


def drivers_killed(folder: Path, kills: int, seed: int) -> Killed:
    """Kill drivers at random times; each job goes on with another number of workers.

    Raises:
        ViolationError: the output of one is not what one process gives.
    """
    random, killed, done = Random(seed), Killed(), 0
    while done < kills:
        place = _place(folder, killed.jobs)
        code, deaths = None, dict[int, float]()
        while code is None:
            workers = str(random.choice((1, 2, 3)))
            program = ["-m", "tests.job.fleet.program", str(place), workers, "paced"]
            process = subprocess.Popen([sys.executable, *program], cwd=ROOT)
            try:
                wait_s = random.uniform(3.0, 20.0) if done < kills else None
                code = process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                at, done = time.monotonic(), done + 1
                pids = [_pid(path) for path in place.glob("pid-*")]
                deaths |= {pid: at for pid in pids if pid not in deaths}
        _check(place, code)
        killed.note(place, deaths)
        killed.jobs += 1
    return killed


def _run_job(place: Path, spec: JobSpec, killer: _Killer, killed: Killed) -> None:
    killer.start()
    code = run(spec, Paced(place))
    killer.over.set()
    killer.join()
    _check(place, code)
    killed.note(place, killer.kills)
    killed.jobs += 1


class _Killer(Thread):
    """Kills one of a job's workers now and then, or what that depends on."""

    def __init__(
        self, folder: Path, random: Random, most: int, kill: Callable[[int, int], None]
    ) -> None:
        super().__init__(daemon=True)
        self.kills: dict[int, float] = {}
        """Workers that it killed, and when."""
        self.over = Event()
        self._folder = folder
        self._random = random
        self._most = most
        self._kill = kill

    def run(self) -> None:
        while len(self.kills) < self._most and not self.over.wait(self._random.uniform(0.2, 8.0)):
            pids = {_pid(path) for path in self._folder.glob("pid-*")} - self.kills.keys()
            alive = sorted(filter(psutil.pid_exists, pids))
            if alive:
                pid = self._random.choice(alive)
                try:
                    self._kill(pid, signal.SIGKILL)
                except (ProcessLookupError, psutil.NoSuchProcess):
                    continue
                self.kills[pid] = time.monotonic()


def _place(folder: Path, number: int) -> Path:
    place = folder / f"job-{number}"
    place.mkdir(parents=True)
    write_rows(place, ROWS)
    return place


def _pid(path: Path) -> int:
    return int(path.name.removeprefix("pid-"))


def _finished(path: Path) -> dict[int, float]:
    """Rows that a process finished, and when."""
    lines = path.read_text().splitlines()
    return {int(row): float(at) for row, at in (line.split() for line in lines)}


def _check(folder: Path, code: int) -> None:
    spec = fleet_job(folder)
    if code != ExitCode.OK:
        raise ViolationError(f"{folder} ended with {code}")
    if part_hashes(folder / "out") != expected(folder, spec):
        raise ViolationError(f"{folder} has other bytes than one process gives")
    if problems := verify(output_at(spec.output.path)).problems:
        raise ViolationError(f"{folder}: {problems}")
