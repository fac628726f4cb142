"""Ends a job whose parts are written: writes exports, partitions, statistics and ``_SUCCESS``."""

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
from batchinfer.job.output import partitioned
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.records.file_record import missing_files, record_files
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.output.resume import refuse_unexpected_files
from batchinfer.job.row_ranges import Part
from batchinfer.job.run.decide import RunPlan
from batchinfer.job.run.reporter import RunReporter
from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.lineage import run_event
from batchinfer.job.stats.run_record import package_versions, runs_of
from batchinfer.job.stats.summary import write_summary


def end_run(plan: RunPlan, job: OutputJob, reporter: RunReporter, stop: Event) -> ExitCode:
    """End a run that has written its parts; end the job too if no process still writes parts."""
    if plan.options.role is not None and plan.options.role.has_launcher:
        return ExitCode.OK
    with plan.claim.ending(stop.is_set) as ending:
        if ending.is_stopped:
            reporter.stopped(job.out, overwrites=plan.options.overwrites)
            return ExitCode.INTERRUPTED
        if ending.ends_job:
            job = replace(job, out=ending.out)
            code = _finish(job, plan.claim, reporter)
            is_success = code is ExitCode.OK
            record_files(job.out, has_success=is_success, open_runs=_open_runs(job.out))
            if is_success:
                job.out.write(job.out.success, b"")
            return code
        reporter.parts_left(job.out, ending.num_parts_left)
        return ExitCode.OK


def _finish(job: OutputJob, claim: Claim, reporter: RunReporter) -> ExitCode:
    """Write exports and statistics; return OK unless too many rows failed or too few succeeded."""
    refuse_unexpected_files(job.out, job.manifest)
    missing = list(missing_files(job.out))
    job.out.reopen()
    records = job.out.of_each(partial(_record, job, claim), job.manifest.parts())
    if job.spec.output.format == "openai-batch":
        export(job.out, job.manifest, job.table.kept, job.spec.model, job.combined_output)
    columns = job.spec.output.partition_by
    # Write partitioned files even if they exist, because they may come from older parts.
    if columns or not partitioned.exists(job.out, columns):
        partitioned.write_partitions(job.out, job.manifest, columns)
    warnings = _nothing_selected(job)
    with phase("merging statistics"):
        lineage_of = partial(_lineage, job, records)
        summary = write_summary(job.out, job.manifest, records, warnings.append, lineage_of)
    for path in missing:
        written_later = path in (job.out.report, *job.out.file_records)
        if not written_later and job.out.files.stat(path) is None:
            warnings.append(f"{path} is missing, and this run could not make it again")
    if job.spec.accept is not None and summary["rows"]["ok"] and not _num_kept(job, summary):
        warnings.append("accept kept no sample of any row; check whether its conditions can be met")
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
    return ExitCode.OK


def _open_runs(out: OutputDir) -> list[str]:
    """Return the ids of the runs of shards and workers that have no recorded end.

    Even a writer that seems dead may end its run later, if its process was only frozen.
    """
    ids = (run.run_id for run in runs_of(out) if not run.ended)
    return [run_id for run_id in ids if writer_of(run_id)]


def _too_many_failed(job: OutputJob, rows: Mapping[str, Any]) -> bool:
    return bool(rows["error"] > job.spec.errors.max_error_rate * rows["total"])


def _num_kept(job: OutputJob, summary: Mapping[str, Any]) -> int:
    """Return the number of good rows; with ``accept``, at most the number of accepted samples."""
    ok: int = summary["rows"]["ok"]
    kept: int = summary["accept"]["samples_accepted"]
    return ok if job.spec.accept is None else min(ok, kept)


def _lineage(
    job: OutputJob, records: Sequence[PartRecord], rows: Mapping[str, Any]
) -> dict[str, Any]:
    return run_event(
        job.spec.name,
        job.manifest,
        inputs=job.source.schema,
        outputs=pa.schema([*job.table.kept_schema, *job.table.generated_schema]),
        output_root=job.out.root,
        output_sizes=[record.size for record in records],
        versions=package_versions(),
        rows_out=rows["total"],
        failed=_too_many_failed(job, rows),
    )


def _nothing_selected(job: OutputJob) -> list[str]:
    """Return a warning for a job without rows, often due to a mistake in the filter."""
    selection = job.spec.input
    if selection.limit == 0 or job.source.num_rows:
        return []
    num_rows = sum(file.num_rows for file in job.source.files)
    if selection.filter is None or not num_rows:
        return ["the input has no rows"]
    return [f"input.filter selects none of the {num_rows:,} rows"]


def _record(job: OutputJob, claim: Claim, part: Part) -> PartRecord:
    """Return the record of a part. Raise DataError if the record is missing, or if the part's file
    does not match it."""
    again = f"to make the part again, run {claim.command_for(part)}"
    try:
        record = job.out.finished(part)
    except DataError as error:
        raise DataError(str(error), hint=again) from None
    if record is None:
        raise DataError(f"the record of {job.out.part_file(part)} is missing", hint=again)
    return record
