"""A program that runs a job on an embedded fleet, one of whose engines may send it a signal, or
kill the daemon of its cluster.

python -m tests.job.fleet.program FOLDER WORKERS [SIGNAL|raylet|paced]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from batchinfer.cli.program import run_program
from tests.job.fleet.engines import Disturbed, KillsNode, Paced, Signals
from tests.job.fleet.jobs import fleet_job, run


def main(**_: str) -> None:
    folder, workers, *wanted = sys.argv[1:]
    number = int(workers)
    spec = fleet_job(Path(folder), scale={"workers": number, "min_workers": number})
    sys.exit(int(run(spec, _build(Path(folder), *wanted))))


def _build(folder: Path, what: str = "") -> Disturbed | Paced | None:
    if what == "raylet":
        return KillsNode(folder)
    if what == "paced":
        return Paced(folder)
    return Signals(folder, os.getpid(), signal.Signals[what]) if what else None


if __name__ == "__main__":
    run_program(main)
