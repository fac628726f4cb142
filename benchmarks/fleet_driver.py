"""Processor time and memory of a fleet's driver, beside workers that only sleep.

    PYTHONPATH=. python benchmarks/fleet_driver.py [--workers 32] [--rows 200000] [--seconds 60]

Driver, Ray and the workers' processes are real, with all that they write; an engine draws letters
and sleeps ``--step`` seconds in each step, so that the fleet finishes about as many rows a second
as one of GPUs. When all workers are up, the driver's own processor time is taken for a while; then
the job is stopped.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.job.fakes import FakeBuild, FakeBuilt, drawn
from tests.job.fleet.jobs import fleet_job, run, write_rows


@dataclass(frozen=True)
class Sleeps:
    """Builds engines whose steps take so many seconds."""

    step_s: float

    def __call__(self, model: object, engine: object, *, log: Callable[[str], None]) -> FakeBuilt:
        build = FakeBuild(next_token=drawn)
        build.before_step = lambda _: time.sleep(self.step_s)
        return build(model, engine, log=log)


def _measure(log: Path, num_workers: int, seconds: float) -> None:
    """Measure this process once all workers are up, then ask it to stop."""
    while not log.exists() or log.read_text().count(" is up on ") < num_workers:
        time.sleep(0.5)
    began, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - used) / (time.monotonic() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{num_workers} workers: {share:.2%} of a core, peak {peak:,.0f} MB", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step", type=float, default=0.2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_rows(place, options.rows)
        spec = fleet_job(
            place,
            output={"rows_per_part": 128},
            scale={"workers": options.workers, "min_workers": options.workers},
        )
        log = place / "out" / "_batchinfer" / "logs" / "run-00001-driver.log"
        arguments = (log, options.workers, options.seconds)
        threading.Thread(target=_measure, args=arguments, daemon=True).start()
        run(spec, Sleeps(options.step))
        records = place / "out" / "_batchinfer" / "parts"
        print(f"{len(list(records.iterdir()))} parts were published", flush=True)


if __name__ == "__main__":
    main()
