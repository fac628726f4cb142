"""What is decided before a job runs: what may be asked for together, on what data, which parts.

Nothing here needs a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from batchinfer.console.format import printable
from batchinfer.errors import DataError, JobError, UsageError
from batchinfer.job.claims.claim import Claim, WholeJob
from batchinfer.job.claims.generation import (
    NextGeneration,
    drop_generations,
    end_swap,
    next_generation,
)
from batchinfer.job.claims.retry import has_errors
from batchinfer.job.claims.shared import Role, SharedClaim
from batchinfer.job.input.dataset import Source
from batchinfer.job.job import OutputJob, identified, open_input, open_job
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.export_record import is_there
from batchinfer.job.output.manifest_file import is_stored_whole, stored_manifest
from batchinfer.job.output.open import output_at
from batchinfer.job.output.partitioned.columns import check_partitions
from batchinfer.job.output.partitioned.record import is_there as is_partitioned
from batchinfer.job.output.partitioned.record import refuse_foreign
from batchinfer.job.output.resume import ResumePlan, plan_resume
from batchinfer.job.run.end import has_exports
from batchinfer.job.run.table_version import at_version
from batchinfer.job.spec.spec import JobSpec


@dataclass(frozen=True)
class RunOptions:
    """What a run does with the output that is there, as ``run_job`` has it."""

    if_exists: str
    """``resume``, ``error`` or ``overwrite``."""
    retry_errors: bool
    update: bool
    role: Role | None = None
    """Of a process beside others; None: it writes alone."""

    @property
    def overwrites(self) -> bool:
        """Whether no row of earlier runs stays."""
        return self.if_exists == "overwrite"


REFUSED: Mapping[tuple[str, str], JobError] = {
    ("--retry-errors", "--overwrite"): UsageError(
        "--retry-errors keeps the good rows, --overwrite keeps none: choose one"
    ),
    ("--update", "--overwrite"): UsageError(
        "--update keeps the good rows, --overwrite keeps none: choose one"
    ),
    ("--worker", "--workers"): UsageError(
        "--worker is one of several workers, --workers starts several: choose one"
    ),
    ("--retry-errors", "--worker"): UsageError(
        "--retry-errors cannot be combined with --worker: others may have begun already",
        hint="run it without --worker: it runs only the rows that ended in an error",
    ),
    ("--update", "--worker"): UsageError(
        "--update cannot be combined with --worker: the new output replaces the old one as a whole",
        hint="run it without --worker: it runs only the rows that differ",
    ),
    ("--retry-errors", "--shard"): UsageError(
        "--retry-errors cannot be combined with --shard: another shard could end the job before "
        "this one has reopened its failed rows",
        hint="run it without --shard: it runs only the rows that ended in an error",
    ),
    ("--update", "--shard"): UsageError(
        "--update cannot be combined with --shard: the new output replaces the old one as a whole",
        hint="run it without --shard: it runs only the rows that differ",
    ),
}
"""Pairs of options that cannot be combined, and the error that says why."""


def refuse_combinations(options: RunOptions, *, has_fleet: bool) -> None:
    """Check that the options can be combined.

    Raises:
        UsageError, NotYetError: two of them cannot, see ``REFUSED``.
    """
    given = {
        "--overwrite": options.overwrites,
        "--retry-errors": options.retry_errors,
        "--update": options.update,
        "--shard": options.role is not None and options.role.shard is not None,
        "--worker": options.role is not None and options.role.is_worker,
        "--workers": has_fleet,
    }
    for pair, error in REFUSED.items():
        if all(given[option] for option in pair):
            raise error.with_traceback(None)


def open_output_job(
    spec: JobSpec, combined_output: PurePath | None, options: RunOptions
) -> OutputJob:
    """A job on its data; of a table, on the version that it was begun with, or on the latest.

    Raises:
        JobError: the job does not fit its data, or its output directory.
    """
    out = output_at(spec.output.path)
    if options.role is None and not options.overwrites:
        end_swap(out)  # first: it decides what is gone on with
    refuse_foreign(out, spec.output.partition_by)
    planned = _planned_before(out)
    if not (options.overwrites or options.update):
        spec = at_version(spec, planned, out, retry_errors=options.retry_errors)
    source = open_input(spec)
    _refuse_own_output(source, out)
    source = identified(source, planned)
    job = open_job(spec, source)
    return OutputJob(spec, source, job.table, job.manifest, out, combined_output)


def _planned_before(out: OutputDir) -> Manifest | None:
    """The plan that is stored there, if there is one."""
    with suppress(DataError):
        return stored_manifest(out)
    return None


def _refuse_own_output(source: Source, out: OutputDir) -> None:
    """Wherever links lead: starting over must not delete what is read."""
    for file in source.files:
        if any(out.files.holds(place, file.path) for place in (out.root, out.data)):
            raise UsageError(
                f"output.path: {printable(file.path)} is both input and output of this job",
                hint="give the output a folder of its own",
            )


def claim_parts(job: OutputJob, options: RunOptions, *, has_fleet: bool = False) -> Claim | None:
    """The claim to what a run is to make; None: the job is finished.

    Raises:
        JobError: what is there is another job's output, or is damaged.
    """
    generation = None
    if options.role is None and not options.overwrites:
        generation = next_generation(
            job.out, job.manifest, update=options.update, retry_errors=options.retry_errors
        )
    if generation is not None:
        return NextGeneration(job.out, generation)
    retries = options.retry_errors
    if _is_finished(job, options) and not (retries and has_errors(job.out, job.manifest)):
        if options.update:
            drop_generations(job.out)
        return None
    role = options.role
    if has_fleet:
        role = Role(None if role is None else role.shard, is_launcher=True)
    if role is None:
        return WholeJob(job.out)
    return SharedClaim(job.out, role, job.spec.engine.order_window)


def check_folders(job: OutputJob, resume: ResumePlan) -> None:
    """Check, before any row runs, that the job's rows can be put into folders by their values.

    Raises:
        UsageError: as ``check_partitions``.
    """
    columns = job.spec.output.partition_by
    if resume.begins or not is_partitioned(job.out, columns):
        check_partitions(columns, job.table.kept, job.source)


def _is_finished(job: OutputJob, options: RunOptions) -> bool:
    """Whether the job is finished, found without a lock or the right to write.

    Raises:
        JobError: what is finished is another job, or of another input.
    """
    if options.overwrites or not _claims_success(job.out):
        return False
    todo = plan_resume(job.out, job.manifest, options.if_exists, "times").todo
    if has_exports(job) and not is_there(job.out, job.combined_output):
        return False
    if not is_partitioned(job.out, job.spec.output.partition_by):
        return False
    return not todo and is_stored_whole(job.out)


def _claims_success(out: OutputDir) -> bool:
    return all(out.files.stat(path) is not None for path in (out.success, out.summary))
