"""Run the long fault tests (``make faults``), and print a table of their results."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.jobs import import_model_code
from tests.faults.stages import STAGES
from tests.faults.violation import ViolationError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"stages to run, from {', '.join(STAGES)}"
    )
    for name, stage in STAGES.items():
        parser.add_argument(f"--{name}", type=int, default=stage.count, help=stage.what)
    parser.add_argument(
        "--flush-every",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between flushes of long answers; if longer, short runs save nothing",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="random seed")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    options = parser.parse_args()
    if unknown := set(options.stages) - STAGES.keys():
        parser.error(f"unknown stages: {', '.join(unknown)}")
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    import_model_code()
    failed = False
    try:
        for name in options.stages or STAGES:
            count = getattr(options, name.replace("-", "_"))
            if not count:
                continue
            place = Path(tempfile.mkdtemp(dir=folder))
            for what, results, verdict in STAGES[name].run(place, count, options):
                failed |= verdict != "ok"
                print(f"| {what} | {results} | {verdict} |", flush=True)
    except ViolationError as violation:
        print(f"VIOLATION: {violation}\nsee {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
