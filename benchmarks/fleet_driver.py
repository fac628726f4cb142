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
import signal
import tempfile
import threading
import time
from pathlib import Path

import psutil

from batchinfer.job.fleet import run_fleet
from tests.job.fleet.engines import Sleeps
from tests.job.fleet.jobs import fleet_job, run, write_rows


def _driver_processes() -> list[psutil.Process]:
    """This process, and the one that has joined the cluster for it."""
    children = psutil.Process().children()
    return [psutil.Process(), *(c for c in children if "ray_main" in " ".join(c.cmdline()))]


def _used_s(processes: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


def _measure(log: Path, num_workers: int, seconds: float) -> None:
    """Measure the driver's processes once all workers are up, then ask it to stop."""
    while not log.exists() or log.read_text().count(" is up on ") < num_workers:
        time.sleep(0.5)
    processes = _driver_processes()
    began, before = time.monotonic(), _used_s(processes)
    time.sleep(seconds)
    lasted = time.monotonic() - began
    names = ("driver", "its process on Ray")
    for name, process, used, after in zip(
        names, processes, before, _used_s(processes), strict=True
    ):
        megabytes = process.memory_info().rss / 1e6
        print(f"{name}: {(after - used) / lasted:.2%} of a core, {megabytes:,.0f} MB", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step", type=float, default=0.2)
    options = parser.parse_args()
    run_fleet._WORKERS_PER_CORE = options.workers  # who sleeps needs no core
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
