"""A program that runs a job on an embedded fleet, one of whose engines may send it a signal.

python -m tests.job.fleet.program FOLDER WORKERS [SIGNAL]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from batchinfer.program import run_program
from tests.job.fleet.engines import Signals
from tests.job.fleet.jobs import fleet_job, run


def main(**_: str) -> None:
    folder, workers, *wanted = sys.argv[1:]
    number = int(workers)
    spec = fleet_job(Path(folder), scale={"workers": number, "min_workers": number})
    build = Signals(Path(folder), os.getpid(), signal.Signals[wanted[0]]) if wanted else None
    sys.exit(int(run(spec, build)))


if __name__ == "__main__":
    run_program(main)
