"""Jobs run through the real commit protocol over files in memory, and what must hold after a crash.

The engine is left out: rows finish in a random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import pyarrow as pa

from batchinfer.engine.request import RequestStats
from batchinfer.job.claims.queue import all_parts
from batchinfer.job.claims.retry_errors import reopen
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.parquet import ParquetFormat
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.commit import publish
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.output.resume import plan_resume, prepare_directory
from batchinfer.job.output.schema import ERROR, OutputTable
from batchinfer.job.rows.finished_row import FinishedRow
from tests.faults.lossy_files import LossyFiles
from tests.faults.violation import ViolationError

OUT = Path("/out")
NUM_ROWS = 5
PLAN = Manifest("f", {}, (), (), NUM_ROWS, 2, "2026-11-20T10:00:00")
GENERATED = pa.schema(
    [
        ("row_id", pa.int64()),
        ("generated_text", pa.string()),
        ("status", pa.string()),
        ("error", ERROR),
    ]
)
TABLE = OutputTable({}, pa.schema([]), GENERATED)
SOURCE = Source((), pa.schema([]), NUM_ROWS, ParquetFormat())
FAILING = {1, 4}
"""Rows that end in an error until the model is mended."""


@dataclass
class Job:
    """One run after another over the same files."""

    files: LossyFiles
    random: Random
    failing: set[int] = field(default_factory=set)
    computed: list[int] = field(default_factory=list)
    """Rows that were run, in order."""
    kept: set[int] = field(default_factory=set)
    """Rows that were promised to be on disk."""
    plan: Manifest = PLAN

    def __post_init__(self) -> None:
        self.out = OutputDir(OUT, self.files)

    def run(self, *, retry: bool = False) -> None:
        """Run the job to its end, or what is left of it."""
        if retry:
            self.kept -= FAILING
        work = plan_resume(self.out, self.plan, "resume")
        prepare_directory(self.out, work)
        if retry:
            reopen(self.out, self.plan, GENERATED)
            work = plan_resume(self.out, self.plan, "resume")
        left = all_parts(self.out, work, GENERATED).next(lambda: False)
        assert left is not None
        sink = PartWriter(
            self.out,
            left.parts,
            left.segments,
            left.finished,
            TABLE,
            SOURCE,
            {},
            lambda: None,
            partial(publish, self.out),
            lambda: 0.0,
        )
        sink.write_complete()
        self._keep_parts()
        rows = [row_id for rows in left.missing for row_id in rows]
        self.random.shuffle(rows)
        buffered: set[int] = set()
        for row_id in rows:
            self.computed.append(row_id)
            sink.add(_finished(row_id, row_id in self.failing))
            buffered.add(row_id)
            self._keep_parts()
            if self.random.random() < 0.4:
                sink.flush()
                self.kept |= buffered
                buffered = set()
        self.out.write(self.out.success, b"")

    def _keep_parts(self) -> None:
        for part in self.plan.parts():
            if self.files.stat(self.out.record(part)) is not None:
                self.kept |= set(part.rows)

    def check_finished(self) -> None:
        """Check that every row is in the output once, in order, with its own text."""
        self.check_parts()
        if self.files.entries(self.out.segments):
            raise ViolationError("segments are left over")

    def check_parts(self) -> None:
        """The same, for readers: they do not look beside the parts."""
        for part in self.plan.parts():
            table = self.out.read_table(self.out.part_file(part))
            ids, texts = (table[name].to_pylist() for name in ("row_id", "generated_text"))
            if ids != list(part.rows):
                raise ViolationError(f"{part.name} holds rows {ids}")
            if texts != [_text(row_id, row_id in self.failing) for row_id in ids]:
                raise ViolationError(f"{part.name} holds {texts}")


def _text(row_id: int, fails: bool) -> str | None:
    return None if fails else f"answer {row_id}"


def _finished(row_id: int, fails: bool) -> FinishedRow:
    error = {"code": "nan_logits", "message": "why"} if fails else None
    values = {
        "row_id": row_id,
        "generated_text": _text(row_id, fails),
        "status": "error" if fails else "ok",
        "error": error,
    }
    return FinishedRow(values, RequestStats(prompt_tokens=1), row_id == 3)


@dataclass(frozen=True)
class CrashState:
    """What is found after the power has gone, and what had been promised by then."""

    files: LossyFiles
    kept: frozenset[int]


Scenario = Callable[[Job], None]


def first_run(job: Job) -> None:
    """A job from its beginning to its end."""
    job.run()


def retry_run(job: Job) -> None:
    """A finished job whose error rows run again, on a mended model."""
    job.failing = set()
    job.run(retry=True)


def crash_states(job: Job, scenario: Scenario, per_change: int) -> Iterator[CrashState]:
    """The states that ``scenario`` may leave, if the power goes after any of its changes."""
    found: list[CrashState] = []

    def crash() -> None:
        for _ in range(per_change):
            lost = job.files.after_power_loss(job.random)
            found.append(CrashState(lost, frozenset(job.kept)))

    job.files.after_change = crash
    scenario(job)
    job.files.after_change = lambda: None
    yield from found


def check(state: CrashState, scenario: Scenario, random: Random) -> None:
    """Go on from a crash, to the end.

    Raises:
        ViolationError: a row that was promised to be on disk ran again, or the output is wrong.
    """
    job = Job(state.files, random)
    scenario(job)
    again = state.kept & set(job.computed)
    if again:
        raise ViolationError(f"rows {sorted(again)} were on disk and ran again")
    job.check_finished()
