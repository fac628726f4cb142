"""Fleets whose workers or launchers are killed at random times."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from batchinfer.errors import ExitCode
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from tests.faults.violation import ViolationError
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, write_rows

ROWS = 2000
ROOT = Path(__file__).parents[2]


@dataclass
class Kills:
    """Results of all kills of workers."""

    jobs: int = 0
    again_s: list[float] = field(default_factory=list)
    """For each kill, the age in seconds of the oldest finished row that it lost."""
    rows_again: int = 0
    """Number of finished rows that kills lost."""


def kill_workers(folder: Path, kills: int, seed: int) -> Kills:
    """Kill workers at random times, in as many jobs as needed.

    Raises:
        ViolationError: an output differs from the output of one process.
    """
    random, outcome = Random(seed), Kills()
    while len(outcome.again_s) < kills:
        place = _new_job(folder, outcome.jobs)
        killed: dict[int, float] = {}
        process = _start(place, workers=2)
        while (code := _ended_within(process, random.uniform(0.2, 8.0))) is None:
            alive = sorted(_workers(place) - killed.keys())
            if alive and len(outcome.again_s) + len(killed) < kills:
                pid = random.choice(alive)
                os.kill(pid, 9)
                killed[pid] = time.monotonic()
        _check(place, code, killed, outcome)
    return outcome


def kill_launchers(folder: Path, kills: int, seed: int) -> Kills:
    """Kill launchers at random times, and resume each job with another number of workers.

    Raises:
        ViolationError: an output differs from the output of one process.
    """
    random, outcome, done = Random(seed), Kills(), 0
    while done < kills:
        place = _new_job(folder, outcome.jobs)
        killed: dict[int, float] = {}
        code = None
        while code is None:
            process = _start(place, workers=random.choice((1, 2, 3)))
            code = _ended_within(process, random.uniform(3.0, 20.0) if done < kills else None)
            if code is None:
                process.kill()
                process.wait()
                at, done = time.monotonic(), done + 1
                killed |= dict.fromkeys(_workers(place) - killed.keys(), at)
        _check(place, code, killed, outcome)
    return outcome


def _new_job(folder: Path, number: int) -> Path:
    place = folder / f"job-{number}"
    place.mkdir(parents=True)
    write_rows(place, ROWS)
    return place


def _start(place: Path, workers: int) -> subprocess.Popen[bytes]:
    program = ["-m", "tests.job.fleet.program", str(place), str(workers), "paced"]
    return subprocess.Popen([sys.executable, *program], cwd=ROOT)


def _ended_within(process: subprocess.Popen[bytes], seconds: float | None) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _logs(place: Path) -> dict[int, Path]:
    """Return the logs of finished rows, keyed by process id; see ``Paced``."""
    return {int(path.name.removeprefix("pid-")): path for path in place.glob("pid-*")}


def _workers(place: Path) -> set[int]:
    return {pid for pid in _logs(place) if Path(f"/proc/{pid}").exists()}


def _check(place: Path, code: int, killed: dict[int, float], outcome: Kills) -> None:
    """Check the output of a job, and count the rows that its kills lost."""
    spec = fleet_job(place)
    if code != ExitCode.OK:
        raise ViolationError(f"{place} ended with {code}")
    if part_hashes(place / "out") != expected(place, spec):
        raise ViolationError(f"{place} differs from the output of one process")
    if problems := verify(output_at(spec.output.path)).problems:
        raise ViolationError(f"{place}: {problems}")
    finished = {
        pid: {int(row): float(at) for row, at in map(str.split, path.read_text().splitlines())}
        for pid, path in _logs(place).items()
    }
    for pid, at in killed.items():
        later = {
            row
            for other, rows in finished.items()
            for row, when in rows.items()
            if other != pid and when > at
        }
        lost = [when for row, when in finished[pid].items() if row in later]
        outcome.again_s.append(at - min(lost, default=at))
        outcome.rows_again += len(lost)
    outcome.jobs += 1
