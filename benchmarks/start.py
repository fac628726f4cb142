"""Measures the time from the start of a job's process to its first token.

    python benchmarks/start.py                          # the quickstart, seven times
    python benchmarks/start.py --job job.yaml --runs 3

Each run is a process that ends after its first step. The first run only fills the page cache, and
is not counted. Prompts must fit into one step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import psutil

QUICKSTART = Path(__file__).resolve().parent.parent / "jobs" / "quickstart.yaml"


def run_to_first_token(job: str, output: str) -> NoReturn:
    """Run the job in this process, and print the age of the process after the first step."""
    from batchinfer.__main__ import main
    from batchinfer.engine.engine import Engine, StepOutcome

    step = Engine.step

    def step_and_report(self: Engine) -> StepOutcome:
        outcome = step(self)
        if outcome.stats is not None:
            print(time.time() - psutil.Process().create_time(), flush=True)
            os._exit(0)
        return outcome

    Engine.step = step_and_report  # type: ignore[method-assign]
    sys.argv = ["batchinfer", "run", job, "--output", output, "--quiet"]
    main()
    sys.exit("the job has no rows to run")


def seconds_of_a_run(job: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--job", str(job), "--child", f"{folder}/out"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token of a job.")
    parser.add_argument("--job", type=Path, default=QUICKSTART)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--child", metavar="OUT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_to_first_token(str(args.job), args.child)
    seconds = [seconds_of_a_run(args.job) for _ in range(args.runs + 1)][1:]
    print(f"median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f}")


if __name__ == "__main__":
    main()
