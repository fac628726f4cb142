"""A fleet with a slow worker on a real clock: engines that sleep, and no model."""

from __future__ import annotations

from pathlib import Path

from batchinfer.errors import ExitCode
from tests.faults.violation import ViolationError
from tests.job.fleet.engines import OneSlow
from tests.job.fleet.jobs import fleet_job, run, write_rows
from tests.job.fleet.shared_cluster import shared_cluster

WORKERS = 3
ROWS = 4000
_STEP_S = 0.02


def time_with_a_slow_worker(folder: Path, slowness: float) -> float:
    """The time that a job takes with one worker slower than the others, from the first step to the
    last, as a multiple of the ideal one.

    The ideal is of workers that never wait and share the work as their speeds are: it is computed
    from the time of as many equal ones.

    Raises:
        ViolationError: a job fails.
    """
    with shared_cluster(WORKERS):
        equal_s = _run(folder / "equal", 1.0)
        slow_s = _run(folder / "slow", slowness)
    ideal_s = equal_s * WORKERS / (WORKERS - 1 + 1 / slowness)
    return slow_s / ideal_s


def _run(folder: Path, slowness: float) -> float:
    write_rows(folder, ROWS)
    scale = {"workers": WORKERS, "min_workers": WORKERS}
    code = run(fleet_job(folder, scale=scale), OneSlow(folder, WORKERS, _STEP_S, slowness))
    if code != ExitCode.OK:
        raise ViolationError(f"{folder} ended with {code}")
    steps = [list(map(float, path.read_text().split())) for path in folder.glob("steps-*")]
    return max(times[-1] for times in steps) - min(times[0] for times in steps)
