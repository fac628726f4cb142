"""``batchinfer verify``: compares every byte of finished output with its record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.console.format import first_line, printable
from batchinfer.console.table import SummaryLine
from batchinfer.errors import DataError, LockedError, StorageError
from batchinfer.job.fingerprint import digest
from batchinfer.job.input.parquet import open_parquet
from batchinfer.job.manifest import Manifest, read_manifest
from batchinfer.job.output.commit import check_part
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.explode import first_of_rows
from batchinfer.job.output.finished_row_segments import read_segment
from batchinfer.job.output.partitioned import problems as partition_problems
from batchinfer.job.output.records.export_record import problems as openai_problems
from batchinfer.job.output.records.file_record import changed_files, has_record
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.output.resume import plan_of, refuse_half_an_update, unexpected_files
from batchinfer.job.row_ranges import Part
from batchinfer.job.storage.filesystem import parse_json, read_file

MOST_SHOWN = 10
_UPDATING = "an update has started; its rows are not checked until the update is complete"
_OLDER = (
    "an older version finished this job and stored no hashes of its statistics, records and logs; "
    "bit errors in these files are not noticed"
)
_FINGERPRINT = b"batchinfer.fingerprint"


@dataclass(frozen=True)
class Verification:
    """Result of ``verify``: the parts, rows and problems of an output directory."""

    complete: bool
    """True if the job is finished and has ``_SUCCESS``."""
    parts_total: int
    parts_done: int
    rows: int
    problems: list[str]
    is_updating: bool = False
    """True if an update has started; ``verify`` does not check its new files."""
    lacks_hashes: bool = False
    """True if an older version finished the job, and stored hashes only for the files of rows."""
    is_half_updated: bool = False
    """True if a run was killed while it replaced the output, or still does; nothing was checked."""

    def data(self) -> dict[str, Any]:
        """Return the values that ``--json`` prints."""
        return {"ok": not self.problems, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield lines of plain text, for output that does not go to a terminal."""
        yield from self._shown()
        yield from self._notes()
        parts = f"{self.parts_done:,} of {self.parts_total:,} parts"
        yield f"{self._state}: {parts}, {self.rows:,} rows; {self._outcome}"

    def facts(self) -> Iterator[SummaryLine]:
        tone = "bad" if self.problems else "good"
        for problem in self._shown():
            yield SummaryLine("problem", problem, tone="bad")
        yield SummaryLine("checked", self._outcome, tone=tone)
        share = self.parts_done / self.parts_total if self.parts_total else 1.0
        yield SummaryLine("parts", f"{self.parts_done:,} of {self.parts_total:,}", share=share)
        yield SummaryLine("rows", f"{self.rows:,}", " in finished parts")
        yield SummaryLine("state", self._state)
        for note in self._notes():
            yield SummaryLine("note", note)

    @property
    def _state(self) -> str:
        if self.complete:
            return "finished"
        return f"not finished{' (no _SUCCESS)' if self.parts_done == self.parts_total else ''}"

    def _shown(self) -> Iterator[str]:
        yield from (printable(problem) for problem in self.problems[:MOST_SHOWN])
        if len(self.problems) > MOST_SHOWN:
            yield f"and {len(self.problems) - MOST_SHOWN:,} more problems"

    def _notes(self) -> Iterator[str]:
        if self.is_updating:
            yield _UPDATING
        if self.lacks_hashes:
            yield _OLDER

    @property
    def _outcome(self) -> str:
        if self.is_half_updated:
            return "if no run is writing to it, run the job again without --shard to finish this"
        if not self.problems:
            return "everything matches its record"
        if all(problem.endswith(" is missing") for problem in self.problems):
            return "run the job again to repair the output"
        # Runs trust parts with the right size and time, so bad parts must be moved.
        return "move the damaged files away and run the job again to repair the output"


def verify(out: OutputDir) -> Verification:
    """Compare everything that is finished in ``out`` with its record. Raise DataError if the output
    has no plan."""
    plan = plan_of(out)
    try:
        refuse_half_an_update(out)
    except LockedError as error:
        parts = len(plan.parts())
        return Verification(False, parts, 0, 0, [error.message], is_half_updated=True)
    return _Check(out, plan).run()


class _Check:
    def __init__(self, out: OutputDir, plan: Manifest) -> None:
        self._out = out
        self._plan = plan
        self._claims_success = out.files.stat(out.success) is not None
        self._schema: pa.Schema | None = None
        self._changed = changed_files(out)

    def run(self) -> Verification:
        problems = [*self._changed.values(), *self._plan_problems()]
        parts = rows = 0
        for part in self._plan.parts():
            if self._out.record(part) in self._changed:
                continue
            try:
                record = self._out.finished(part, "nothing")
                if record is not None:
                    self._check_part(part, record)
                    parts += 1
                    rows += part.num_rows
                elif self._claims_success:
                    problems.append(f"{self._out.part_file(part)} has no record despite _SUCCESS")
            except (DataError, StorageError, ValueError, OSError) as error:
                problems.append(first_line(error))
        problems += [
            *self._key_problems(),
            *self._segment_problems(),
            *self._summary_problems(),
            *self._export_problems(),
        ]
        total = len(self._plan.parts())
        complete = self._claims_success and parts == total
        is_updating = bool(self._out.files.entries(self._out.next))
        lacks_hashes = self._claims_success and not has_record(self._out)
        return Verification(complete, total, parts, rows, problems, is_updating, lacks_hashes)

    def _plan_problems(self) -> Iterator[str]:
        if digest(self._plan.job) != self._plan.fingerprint:
            yield f"{self._out.manifest}: its fingerprint does not match the job in it"
        try:
            if self._out.manifest not in self._changed:
                read_manifest(self._out.manifest, self._out.files)
        except DataError as error:
            yield str(error)
        for path in unexpected_files(self._out, self._plan):
            yield f"{path} is not a part of this job"

    def _check_part(self, part: Part, record: PartRecord) -> None:
        path = self._out.part_file(part)
        with self._out.files.open(path) as opened:
            file = pa.PythonFile(opened, mode="r")
            try:
                check_part(file, part)
            except ValueError as error:
                raise DataError(f"{path}: {error}") from None
            reader = open_parquet(file)
            self._check_schema(path, reader.schema_arrow)
            rows = first_of_rows(reader.read(["row_id", "status"], use_threads=False))
        failed = pc.sum(pc.equal(rows["status"], "error")).as_py() or 0
        recorded = sum(record.error_codes.values())
        if failed != recorded:
            raise DataError(f"{path} has {failed:,} failed rows, but its record says {recorded:,}")

    def _check_schema(self, path: PurePath, schema: pa.Schema) -> None:
        if (schema.metadata or {}).get(_FINGERPRINT, b"").decode() != self._plan.fingerprint:
            raise DataError(f"{path} was made by another job (its fingerprint differs)")
        self._schema = self._schema or schema
        if not schema.equals(self._schema):
            raise DataError(f"{path} has different columns from the parts before it")

    def _key_problems(self) -> Iterator[str]:
        """Yield the problems of key files. A missing key file is not a problem; it only prevents
        reuse by other jobs."""
        for part in self._plan.parts():
            path, record = self._out.row_keys(part), None
            if path in self._changed:
                continue
            with suppress(DataError):  # ``run`` reports a damaged record
                record = self._out.read_record(part)
            if record is None or record.keys_sha256 is None or self._out.files.stat(path) is None:
                continue
            try:
                self._out.check_hash(path, record.keys_sha256)
            except (DataError, StorageError) as error:
                yield first_line(error)

    def _export_problems(self) -> Iterator[str]:
        if self._out.openai_record not in self._changed:
            yield from openai_problems(self._out)
        if self._out.partitioned_record not in self._changed:
            yield from partition_problems(self._out)

    def _segment_problems(self) -> Iterator[str]:
        for path in self._out.files.entries(self._out.segments):
            try:
                read_segment(self._out.files, path)
            except FileNotFoundError:
                continue  # a running job has merged the segment's rows into a part
            except StorageError as error:
                yield first_line(error)
            except (OSError, ValueError) as error:
                yield f"{path} cannot be read: {first_line(error)}"

    def _summary_problems(self) -> Iterator[str]:
        if not self._claims_success or self._out.summary in self._changed:
            return
        summary: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            summary = parse_json(read_file(self._out.files, self._out.summary))
        try:
            if summary["fingerprint"] != self._plan.fingerprint:
                yield f"{self._out.summary} belongs to another job (its fingerprint differs)"
            total = summary["rows"]["total"]
            if total != self._plan.num_rows:
                yield f"{self._out.summary} counts {total} rows, not {self._plan.num_rows}"
        except (KeyError, TypeError):
            yield f"{self._out.summary} is damaged or missing"
