"""Jobs killed again and again, and what must be true of them afterwards."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import ExitCode
from batchinfer.job.claims import swap_generation
from batchinfer.job.claims.shared import Role
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage import filesystem as files
from batchinfer.process.process import leave_on_signals
from tests.faults.children import KILLED, BuildEngine, Child, Pace, start
from tests.faults.outputs import InFolder, Output
from tests.faults.violation import ViolationError

KINDS = ("runs", "steps", "segments", "requests", "data", "parts")
_ANSWER = ("row_id", "generated_text", "status", "outputs")
STAGES = ("staged", "synced", "renamed", "durable")
_HELD_S = 120.0
"""Longest that a run is held for another to end: where both go on, neither does."""
Answers = list[tuple[int, str | None, str, object]]


@dataclass
class Outcome:
    """What a number of kills came to."""

    kills: int = 0
    jobs: int = 0
    again: list[float] = field(default_factory=list)
    """Of each kill: seconds between the first finished row that it lost and the kill."""
    rows_again: int = 0
    """Finished rows that were computed again, in all."""


@dataclass
class Killer:
    """Runs one job over and over, in a folder of its own each time.

    Args:
        folder: to work in.
        spec: the job; its output goes elsewhere.
        build: makes the engine; None: the real one.
        pace: how often finished rows go to disk.
        output: where output goes.
        role: what the process makes of the job; None: all of it.
    """

    folder: Path
    spec: JobSpec
    build: BuildEngine | None
    pace: Pace
    output: Output = field(default_factory=InFolder)
    role: Role | None = None

    def __post_init__(self) -> None:
        self.outcome = Outcome()
        self._place = self.folder
        self._count = 0
        self.answers: Answers = []
        """Of an unbroken run."""
        self.seconds = 0.0
        """That it took."""
        self.reached: Counter[str] = Counter()
        """How often it came to each failpoint."""

    def run_unbroken(self) -> None:
        """Run the job once without a kill; what comes of it is right."""
        self._begin()
        counts = self._place / "counts"
        began = time.monotonic()
        code = start(
            self._job(),
            self.build,
            self.pace,
            self._place,
            around=lambda: count_to(counts),
            role=self.role,
        ).wait()
        self.seconds = time.monotonic() - began
        self._expect(code, ExitCode.OK)
        self.answers = self._answers()
        self.reached = Counter(counts.read_text().split())

    def kill_at_random(self, kills: int, random: Random) -> None:
        """Kill jobs at random times until there were so many kills; the last job is finished."""
        while self.outcome.kills < kills:
            self._begin()
            code = KILLED
            while code == KILLED:
                at = random.uniform(0.02, 0.5) * self.seconds
                killing = self.outcome.kills < kills
                code = self._run(at if killing else 600.0)
            self._check(code)

    def kill_at(self, failpoint: str, random: Random) -> None:
        """Kill a job at a failpoint, kill the run that goes on, then let it finish."""
        self._begin()
        self._expect(self._run(600.0, failpoint), KILLED)
        self._run(random.uniform(0.02, 0.6) * self.seconds)
        self._check(self._run(600.0))

    def stop_at_random(self, stops: int, random: Random) -> list[float]:
        """Stop jobs by SIGTERM at random times, and finish each.

        Returns:
            Seconds from each signal to the end of the process.
        """
        waited: list[float] = []
        while len(waited) < stops:
            self._begin()
            at = random.uniform(0.0, 0.95) * self.seconds
            child = start(self._job(), self.build, self.pace, self._place, around=leave_on_signals)
            code, seconds = child.signal_after(at, signal.SIGTERM)
            if code == ExitCode.INTERRUPTED:
                waited.append(seconds)
            elif code != ExitCode.OK:
                raise ViolationError(f"SIGTERM ended in {code}:\n{child.log.read_text()}")
            self._check(self._run(600.0))
        return waited

    def race(self) -> list[int]:
        """Start two runs of one job at once; their exit statuses, sorted.

        One that writes its first part waits there until the other has ended: else that may begin
        so late that it finds nothing to do.
        """
        self._begin()
        places = [self._place / name for name in ("one", "other")]
        for place in places:
            place.mkdir()
        go_on = self._place / "go on"
        runs = [
            start(self._job(), self.build, self.pace, place, around=lambda: _hold_until(go_on))
            for place in places
        ]
        until = time.monotonic() + _HELD_S
        while not any(run.has_ended() for run in runs) and time.monotonic() < until:
            time.sleep(0.002)
        go_on.touch()
        codes = sorted(run.wait() for run in runs)
        self._check(self._run(600.0))
        return codes

    def run_until_done(self, failpoint: str, most: int) -> int:
        """Run a job again and again that kills itself at ``failpoint``; its last exit status."""
        self._begin()
        for _ in range(most):
            code = self._run(600.0, failpoint)
            if code != KILLED:
                return code
        raise ViolationError(f"still dies after {most} runs")

    def rows(self) -> list[dict[str, object]]:
        """The output of the latest job."""
        return self._table().to_pylist()

    def named_points(self) -> Iterator[str]:
        """Each commit step of each kind of file: its first, middle and last time."""
        for kind in KINDS:
            for stage in STAGES:
                last = self.reached[f"{kind}-{stage}"]
                for times in (1, (last + 1) // 2, last):
                    yield f"{kind}-{stage}:{times}"

    def _begin(self) -> None:
        if self._count:
            shutil.rmtree(self._place)
        self._count += 1
        self._place = self.folder / str(self._count)
        self._place.mkdir()
        self.output.begin(self._place)

    def _job(self) -> JobSpec:
        output = self.spec.output.model_copy(update={"path": self.output.path})
        return self.spec.model_copy(update={"output": output})

    def _run(self, kill_after_s: float, failpoint: str = "") -> int:
        before = self._kept()
        told = self._place / "finished"
        told.unlink(missing_ok=True)
        child: Child = start(
            self._job(), self.build, self.pace, self._place, failpoint, role=self.role
        )
        code = child.kill_after(kill_after_s)
        self._note(code, before, told)
        return code

    def _note(self, code: int, before: set[int], told: Path) -> None:
        ended = time.monotonic()
        lines = told.read_text().splitlines() if told.exists() else []
        finished = {int(row): float(at) for row, at in (line.split() for line in lines)}
        if before & finished.keys():
            raise ViolationError(f"rows {sorted(before & finished.keys())} ran again")
        if code != KILLED:
            return
        self.outcome.kills += 1
        lost = [at for row, at in finished.items() if row not in self._kept()]
        self.outcome.rows_again += len(lost)
        self.outcome.again.append(ended - min(lost, default=ended))

    def _kept(self) -> set[int]:
        """Rows on disk: of finished parts and of segments."""
        files = self.output.files()
        if "_batchinfer/manifest.json" not in files:
            return set()
        plan = json.loads(files["_batchinfer/manifest.json"])
        of_part = plan["rows_per_part"]
        kept: set[int] = set()
        for name, data in files.items():
            if record := re.fullmatch(r"_batchinfer/parts/part-(\d+)\.json", name):
                start = int(record.group(1)) * of_part
                kept |= set(range(start, min(start + of_part, plan["num_rows"])))
            elif name.startswith("_batchinfer/segments/"):
                table = pq.ParquetFile(BytesIO(data)).read(["row_id"], use_threads=False)
                kept |= set(table["row_id"].to_pylist())
        return kept

    def _check(self, code: int) -> None:
        self._expect(code, ExitCode.OK)
        if self._answers() != self.answers:
            raise ViolationError(f"{self.output.path} is not as that of an unbroken run")
        self.outcome.jobs += 1

    def _expect(self, code: int, wanted: int) -> None:
        if code != wanted:
            raise ViolationError(f"exit {code}, not {wanted}:\n{(self._place / 'log').read_text()}")

    def _table(self) -> pa.Table:
        files = self.output.files().items()
        parts = [BytesIO(data) for name, data in files if name.startswith("data/")]
        return pa.concat_tables(pq.ParquetFile(part).read(use_threads=False) for part in parts)

    def _answers(self) -> Answers:
        table = self._table()
        row_ids = table["row_id"].to_numpy()
        if not np.array_equal(row_ids, np.arange(len(row_ids))):
            raise ViolationError("rows are lost, duplicated or out of order")
        columns = (table[name].to_pylist() for name in _ANSWER)
        return list(zip(*columns, strict=True))


def count_to(path: Path) -> None:
    """Write down the name of each failpoint that is reached."""
    file = path.open("a", buffering=1)
    failpoint = files.failpoint

    def tell(name: str) -> None:
        file.write(name + "\n")
        failpoint(name)

    files.failpoint = swap_generation.failpoint = tell


def _hold_until(path: Path) -> None:
    """Wait at the first part until a file is there."""
    failpoint = files.failpoint

    def wait(name: str) -> None:
        while name == "data-staged" and not path.exists():
            time.sleep(0.002)
        failpoint(name)

    files.failpoint = wait
