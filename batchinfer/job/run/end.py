"""The end of a job whose parts are made: exports, folders by values, statistics, _SUCCESS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import pyarrow as pa

from batchinfer.console.phases import phase
from batchinfer.errors import DataError, ExitCode
from batchinfer.job.claims.claim import Claim
from batchinfer.job.job import OutputJob
from batchinfer.job.openai.export import export
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.output.partitioned.record import is_there as is_partitioned
from batchinfer.job.output.partitioned.write import write_partitions
from batchinfer.job.output.resume import refuse_unexpected_files
from batchinfer.job.row_ids import Part
from batchinfer.job.run.reporter import RunReporter
from batchinfer.job.stats.lineage import run_event
from batchinfer.job.stats.recorder import package_versions
from batchinfer.job.stats.summary import write_summary


def end_run(
    job: OutputJob, claim: Claim, reporter: RunReporter, stop: Event, *, overwrites: bool
) -> ExitCode:
    """End a run that has made its parts, and the job, where nobody else has any to make."""
    with claim.ending(stop.is_set) as ending:
        if ending.is_stopped:
            reporter.stopped(job.out, overwrites=overwrites)
            return ExitCode.INTERRUPTED
        if ending.is_ours:
            return _finish(replace(job, out=ending.out), claim, reporter)
        reporter.parts_left(job.out, ending.others_left)
        return ExitCode.OK


def has_exports(job: OutputJob) -> bool:
    """Whether output of the job is written in another format too."""
    return job.spec.output.format == "openai-batch"


def _finish(job: OutputJob, claim: Claim, reporter: RunReporter) -> ExitCode:
    """Write the statistics of a job whose parts are made, and _SUCCESS if few rows failed."""
    refuse_unexpected_files(job.out, job.manifest)
    records = job.out.of_each(partial(_record, job, claim), job.manifest.parts())
    if has_exports(job):
        export(job.out, job.manifest, job.table.kept, job.spec.model, job.combined_output)
    columns = job.spec.output.partition_by
    if columns or not is_partitioned(job.out, columns):  # of what was there parts may be newer
        write_partitions(job.out, job.manifest, columns)
    warnings = _nothing_selected(job)
    with phase("merging statistics"):
        lineage_of = partial(_lineage, job, records)
        summary = write_summary(job.out, job.manifest, records, warnings.append, lineage_of)
    if job.spec.accept is not None and summary["rows"]["ok"] and not _num_kept(job, summary):
        warnings.append("accept keeps no sample of any row: see whether its conditions can be met")
    reporter.end(job.out, summary, warnings)
    job.out.empty(job.out.segments)
    job.out.empty(job.out.tokens)
    job.source.check_unchanged()
    rows, limit = summary["rows"], job.spec.errors.max_error_rate
    if _too_many_failed(job, rows):
        reporter.too_many_errors(job.out, rows, limit)
        return ExitCode.TOO_MANY_ROW_ERRORS
    kept, least = _num_kept(job, summary), job.spec.errors.min_rows
    if least is not None and kept < least:
        reporter.too_few_rows(job.out, kept, least)
        return ExitCode.TOO_MANY_ROW_ERRORS
    job.out.write(job.out.success, b"")
    return ExitCode.OK


def _too_many_failed(job: OutputJob, rows: Mapping[str, Any]) -> bool:
    return bool(rows["error"] > job.spec.errors.max_error_rate * rows["total"])


def _num_kept(job: OutputJob, summary: Mapping[str, Any]) -> int:
    """Rows that ended well, or, where samples are judged, samples that passed."""
    ok: int = summary["rows"]["ok"]
    kept: int = summary["accept"]["samples_accepted"]
    return ok if job.spec.accept is None else min(ok, kept)


def _lineage(
    job: OutputJob, records: Sequence[PartRecord], rows: Mapping[str, Any]
) -> dict[str, Any]:
    table = job.table
    return run_event(
        job.spec.name,
        job.manifest,
        inputs=job.source.schema,
        outputs=pa.schema([*table.kept_schema, *table.generated_schema]),
        output_root=job.out.root,
        output_sizes=[record.size for record in records],
        versions=package_versions(),
        rows_out=rows["total"],
        failed=_too_many_failed(job, rows),
    )


def _nothing_selected(job: OutputJob) -> list[str]:
    """A line to say that there is nothing to run: no rows, or a filter, most often misspelt."""
    chosen = job.spec.input
    if chosen.limit == 0 or job.source.num_rows:
        return []
    there = sum(file.num_rows for file in job.source.files)
    if chosen.filter is None or not there:
        return ["the input has no rows"]
    return [f"input.filter selects none of the {there:,} rows"]


def _record(job: OutputJob, claim: Claim, part: Part) -> PartRecord:
    """The record of a part that has been made; nothing may have touched it since."""
    again = f"run {claim.command_for(part)} again: the part is then made again"
    try:
        record = job.out.finished(part)
    except DataError as error:
        raise DataError(str(error), hint=again) from None
    if record is None:
        raise DataError(f"{job.out.part_file(part)} has no record any more", hint=again)
    return record
