"""Runs the matrix of ``docs/proof.md``: models, faults and schedules (``make proof``).

python -m tests.proof                                      # all cells that have no result yet
python -m tests.proof qwen3.sigterm.small-pool             # this cell, again
python -m tests.proof --models qwen3 --faults sigterm      # some cells
python -m tests.proof --publish                            # the table and the picture of the docs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from itertools import product
from pathlib import Path

from filelock import FileLock, Timeout

from tests.faults.jobs import import_model_code
from tests.proof.cells import Matrix, Result, stored_results
from tests.proof.checkpoints import CHECKPOINTS
from tests.proof.faults import FAULTS
from tests.proof.jobs import SCHEDULES
from tests.proof.picture import draw, write_table
from tests.proof.stores import stores


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__)
    parser.add_argument("cells", nargs="*", metavar="MODEL.FAULT.SCHEDULE", help="cells to repeat")
    parser.add_argument("--models", nargs="+", choices=CHECKPOINTS, default=[*CHECKPOINTS])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument("--folder", type=Path, default=Path("out/proof"))
    parser.add_argument("--publish", action="store_true", help="publish the results so far")
    options = parser.parse_args()
    names = (options.models, options.faults, options.schedules)
    if options.publish:
        return _publish(options.folder)
    cells = [tuple(name.split(".")) for name in options.cells] or [*product(*names)]
    with only_user_of(options.folder), stores() as (store, flaky_store):
        import_model_code()
        matrix = Matrix(options.folder.resolve(), store, flaky_store)
        results = []
        for cell in cells:
            result = None if options.cells else matrix.result(*cell)
            results.append(result or matrix.run(*cell))
            if result is None:
                print(_line(results[-1]), flush=True)
    bad = [result for result in results if result.verdict != "equal"]
    print(f"{len(results) - len(bad)} of {len(results)} cells equal")
    return int(bool(bad))


@contextmanager
def only_user_of(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder of results, because cells of two processes would mix their files.

    The lock ends with the process, even if the process is killed.

    Raises:
        SystemExit: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        sys.exit(
            f"{folder} is in use by another `python -m tests.proof`; wait until it has ended, or "
            "use --folder for another folder"
        )
    with lock:
        yield


def _publish(folder: Path) -> int:
    """Write the results as a table to ``benchmarks/results``, and as a picture to ``docs``."""
    results = stored_results(folder)
    write_table(results, Path(f"benchmarks/results/proof-{date.today()}.parquet"))
    Path("docs/proof.svg").write_text(draw(results), encoding="utf-8")
    print(f"{len(results)} cells, {sum(one.seconds for one in results) / 3600:.1f} hours")
    return 0


def _line(result: Result) -> str:
    counts = f"{result.lost} lost, {result.doubled} doubled, {result.differing} differ"
    name = f"{result.model}.{result.fault}.{result.schedule}"
    line = f"{result.verdict:8} {name:50} {counts}, exits {result.exit_codes}, {result.seconds} s"
    return f"{line}\n{result.cause}" if result.cause else line


if __name__ == "__main__":
    sys.exit(main())
