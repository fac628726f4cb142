"""Run a job on a fleet on this machine.

``python -m tests.job.fleet.program FOLDER WORKERS [SIGNAL|paced]``: with SIGNAL, one of the
workers sends this signal to the program; with ``paced``, the engines are slow.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batchinfer.cli.program import run_program
from tests.job.fleet.engines import Disturbed, Paced
from tests.job.fleet.jobs import fleet_job, run


def main(**_: str) -> None:
    folder, workers, *wanted = sys.argv[1:]
    place, number = Path(folder), int(workers)
    spec = fleet_job(place, scale={"workers": number, "min_workers": number})
    build: Disturbed | Paced | None = None
    if wanted:
        own = Disturbed(place, wanted[0], at=30, pid=os.getpid())
        build = Paced(place) if wanted[0] == "paced" else own
    sys.exit(int(run(spec, build)))


if __name__ == "__main__":
    run_program(main)
