"""Jobs without an engine that run the real commit protocol on files in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

import pyarrow as pa

from batchinfer.engine.request import RequestStats
from batchinfer.errors import DataError
from batchinfer.job.claims import swap_generation
from batchinfer.job.claims.part_queue import all_parts
from batchinfer.job.claims.retry_errors import reopen
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.parquet import ParquetFormat
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.commit import publish
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import stored_manifest
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.output.resume import plan_resume, prepare_directory
from batchinfer.job.output.schema import ERROR, OutputTable
from batchinfer.job.rows.finished_row import FinishedRow
from tests.faults.lossy_files import LossyFiles
from tests.faults.violation import ViolationError

OUT = Path("/out")
NUM_ROWS = 5
PLAN = Manifest("f", {}, (), (), NUM_ROWS, 2, "2026-11-20T10:00:00")
NEXT_PLAN = replace(PLAN, fingerprint="g", rows_per_part=3)
"""The plan of an update."""
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
FAILING = frozenset({1, 4})
"""Rows that end in an error until a run retries them."""


@dataclass
class Job:
    """A run of a job; rows finish in a random order."""

    files: LossyFiles
    random: Random
    failing: frozenset[int] = frozenset()
    kept: set[int] = field(default_factory=set)
    """Rows that the protocol promises to have on disk."""
    computed: list[int] = field(default_factory=list)
    """Rows that this run computed, in order."""
    plan: Manifest = PLAN

    def __post_init__(self) -> None:
        self.out = OutputDir(OUT, self.files)

    def run(self, *, retry: bool = False) -> None:
        """Run or resume the job.

        Args:
            retry: compute rows with errors again.
        """
        work = plan_resume(self.out, self.plan, "resume")
        prepare_directory(self.out, work)
        if retry:
            reopen(self.out, self.plan, GENERATED)
            work = plan_resume(self.out, self.plan, "resume")
        claim = all_parts(self.out, work, GENERATED).next(lambda: False)
        sink = PartWriter(
            self.out,
            claim.parts,
            claim.segments,
            claim.finished,
            TABLE,
            SOURCE,
            {},
            lambda: None,
            partial(publish, self.out),
            lambda: 0.0,
        )
        sink.write_complete()
        self._keep_parts()
        rows = [row_id for rows in claim.missing for row_id in rows]
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

    def update(self) -> None:
        """Make or resume the generation of ``NEXT_PLAN``, and put it in place."""
        present = self.out
        swap_generation.finish_swap(present)
        self.plan = NEXT_PLAN
        if stored_manifest(present).fingerprint == NEXT_PLAN.fingerprint:
            self.run()  # no row is missing
            return
        self.out = present.generation(NEXT_PLAN.name)
        self.run()
        swap_generation.put_in_place(present, self.out)
        self.out = present

    def _keep_parts(self) -> None:
        for part in self.plan.parts():
            if self.files.stat(self.out.record(part)) is not None:
                self.kept |= set(part.rows)

    def check_parts(self) -> None:
        """Check that the parts hold every row once, in order, with its own text."""
        for part in self.plan.parts():
            table = self.out.read_table(self.out.part_file(part))
            ids, texts = (table[name].to_pylist() for name in ("row_id", "generated_text"))
            if ids != list(part.rows):
                raise ViolationError(f"{part.name} holds rows {ids}")
            if texts != [_text(row_id, row_id in self.failing) for row_id in ids]:
                raise ViolationError(f"{part.name} holds {texts}")

    def check_finished(self) -> None:
        """Check the parts, and that no temporary file remains."""
        self.check_parts()
        if self.files.entries(self.out.segments) or self.files.entries(self.out.next):
            raise ViolationError("segments or another generation remain")
        if self.files.stat(self.out.swap) is not None:
            raise ViolationError("the record of a swap remains")

    def check_one_generation(self) -> None:
        """Check that readers see one finished generation, unless a record announces a swap."""
        if self.files.stat(self.out.swap) is not None:
            return
        try:
            stored = stored_manifest(self.out)
        except DataError as error:
            raise ViolationError(str(error)) from None
        self.plan = NEXT_PLAN if stored.fingerprint == NEXT_PLAN.fingerprint else PLAN
        self.check_parts()
        if self.files.stat(self.out.success) is None:
            raise ViolationError("the present generation has no _SUCCESS")


def _text(row_id: int, fails: bool) -> str | None:
    return None if fails else f"answer {row_id}"


def _finished(row_id: int, fails: bool) -> FinishedRow:
    values = {
        "row_id": row_id,
        "generated_text": _text(row_id, fails),
        "status": "error" if fails else "ok",
        "error": {"code": "nan_logits", "message": "why"} if fails else None,
    }
    return FinishedRow(values, RequestStats(prompt_tokens=1), row_id == 3)
