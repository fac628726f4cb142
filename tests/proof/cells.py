"""Runs the cells of the matrix: the same job without and with a fault, and compares their rows."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import ExitCode
from tests.faults.kills import InBucket, InFolder
from tests.job.stores import environment
from tests.proof.faults import FAULTS
from tests.proof.jobs import SCHEDULES, SMALL_POOLS, make_inputs, make_job
from tests.proof.runs import Runs, StuckError

_BASELINE = {"chunks-of-7": "chunks-of-7"}
"""Schedules with answers of their own. All others must give the answers of ``input-order``."""


@dataclass(frozen=True)
class Result:
    """The result of a cell: what the job's output was after a fault."""

    model: str
    fault: str
    schedule: str
    verdict: str
    """``equal``, ``differs``, or ``stuck`` if the job did not end as it should."""
    rows: int
    lost: int
    """Number of rows of the input that are missing from the output."""
    doubled: int
    """Number of rows that are in the output more than once."""
    differing: int
    """Number of rows whose values differ from those of the undisturbed run in at least one bit."""
    same_files: bool
    """True if the part files equal those of the undisturbed run, byte for byte."""
    exit_codes: list[int]
    """Exit statuses of all runs; -9 for a process that was killed."""
    seconds: float
    cause: str = ""
    """Why the job did not end."""


def stored_results(folder: Path) -> list[Result]:
    """Return the results of all cells that have run in ``folder``."""
    paths = sorted((folder / "cells").glob("*.json"))
    return [Result(**json.loads(path.read_text())) for path in paths]


@dataclass
class Matrix:
    """A folder with everything that cells need and leave.

    Args:
        folder: the folder; it may hold the results of earlier cells.
        store: address of a store that answers normally.
        flaky_store: address of the same store, through a proxy that answers one of three requests
            with 503.
    """

    folder: Path
    store: str
    flaky_store: str

    def __post_init__(self) -> None:
        os.environ.update(environment(self.store))
        self._bucket = InBucket(self.store)

    def result(self, model: str, fault: str, schedule: str) -> Result | None:
        """Return the stored result of a cell, if there is one."""
        path = self._path(model, fault, schedule)
        return Result(**json.loads(path.read_text())) if path.exists() else None

    def run(self, model: str, fault: str, schedule: str) -> Result:
        """Run a cell and store its result."""
        num_blocks = self._num_blocks(model)
        expected = self._undisturbed(model, _BASELINE.get(schedule, "input-order"), num_blocks)
        place, began, cause = self.folder / "now", time.monotonic(), ""
        with self._output(place, in_store=FAULTS[fault].in_store) as output:
            runs = self._runs(model, schedule, place, output, num_blocks)
            try:
                FAULTS[fault].strike(runs)
            except StuckError as error:
                log = (place / "log").read_text().strip().splitlines()[-3:]
                cause = "\n".join([str(error), *log])
            result = compare(expected, _parts(runs), cause)
        seconds = round(time.monotonic() - began, 2)
        whole = Result(model, fault, schedule, **result, exit_codes=runs.codes, seconds=seconds)
        path = self._path(model, fault, schedule)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(whole)))
        return whole

    def _path(self, model: str, fault: str, schedule: str) -> Path:
        return self.folder / "cells" / f"{model}.{fault}.{schedule}.json"

    def _inputs(self, model: str) -> Path:
        folder = self.folder / "inputs" / model
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(model, folder)
        return folder

    @contextmanager
    def _output(self, place: Path, *, in_store: bool) -> Iterator[InFolder | InBucket]:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        os.environ.update(environment(self.flaky_store if in_store else self.store))
        output = self._bucket if in_store else InFolder()
        output.begin(place)
        yield output

    def _runs(
        self, model: str, schedule: str, place: Path, output: InFolder | InBucket, num_blocks: int
    ) -> Runs:
        chosen = SCHEDULES[schedule]
        spec = make_job(model, chosen, self._inputs(model), output.path, num_blocks)
        return Runs(spec, output, chosen.num_workers, place)

    def _undisturbed(self, model: str, schedule: str, num_blocks: int) -> dict[str, bytes]:
        """Return the part files of a run without faults, which is made once."""
        place = self.folder / "undisturbed" / f"{model}.{schedule}"
        output = InFolder()
        output.path = str(place / "out")
        runs = self._runs(model, schedule, place, output, num_blocks)
        if not (place / "out" / "_SUCCESS").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            runs.finish()
        return _parts(runs)

    def _num_blocks(self, model: str) -> int:
        """Return the size of the smallest pool in which each row of the model's job fits."""
        path = self.folder / "pools" / model
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(next(size for size in SMALL_POOLS if self._fits(model, size))))
        return int(path.read_text())

    def _fits(self, model: str, num_blocks: int) -> bool:
        place = self.folder / "now"
        with self._output(place, in_store=False) as output:
            return self._runs(model, "small-pool", place, output, num_blocks).run() == ExitCode.OK


def _parts(runs: Runs) -> dict[str, bytes]:
    return runs.files("data/")


def compare(expected: dict[str, bytes], parts: dict[str, bytes], cause: str) -> dict[str, Any]:
    """Compare the rows of two outputs, given as part files by name."""
    wanted, found = _rows(expected), _rows(parts)
    counts = Counter(row_id for row_id, _ in found)
    by_id = dict(found)
    lost = sum(row_id not in counts for row_id, _ in wanted)
    doubled = sum(count > 1 for count in counts.values())
    differing = sum(row_id in by_id and by_id[row_id] != row for row_id, row in wanted)
    is_equal = parts == expected and not (lost or doubled or differing)
    verdict = "stuck" if cause else "equal" if is_equal else "differs"
    return {
        **{"verdict": verdict, "rows": len(found), "lost": lost, "doubled": doubled},
        **{"differing": differing, "same_files": parts == expected, "cause": cause},
    }


def _rows(parts: dict[str, bytes]) -> list[tuple[int, str]]:
    """Return the id and all values of each row, in the order of the output."""
    rows = []
    for name in sorted(parts):
        try:
            table: pa.Table = pq.ParquetFile(BytesIO(parts[name])).read(use_threads=False)
        except (pa.ArrowException, OSError):
            continue  # the rows of a damaged file count as lost
        rows += [(row["row_id"], json.dumps(row, default=repr)) for row in table.to_pylist()]
    return rows
