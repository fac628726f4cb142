"""Decides what a run does, before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePath

from batchinfer.console.format import counted, printable
from batchinfer.console.terminal import print_line
from batchinfer.errors import DataError, JobError, UsageError
from batchinfer.job.claims.claim import Claim
from batchinfer.job.claims.generation import drop_generations, next_generation
from batchinfer.job.claims.kernels import noted_kernels
from batchinfer.job.claims.retry_errors import has_errors, reopen
from batchinfer.job.claims.shared_claim import Role, SharedClaim
from batchinfer.job.claims.swap_generation import end_swap
from batchinfer.job.images.changed_images import image_file_facts
from batchinfer.job.input.changed_files import have_common_files
from batchinfer.job.input.dataset import Source
from batchinfer.job.job import OutputJob, identified, open_input, open_job, with_checked_inputs
from batchinfer.job.manifest import Manifest
from batchinfer.job.output import partitioned
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.manifest_file import is_stored_whole, stored_manifest
from batchinfer.job.output.open import output_at
from batchinfer.job.output.records import export_record
from batchinfer.job.output.records.file_record import missing_files
from batchinfer.job.output.resume import ResumePlan, has_finished_rows, plan_resume
from batchinfer.job.reuse.reuse import open_outputs
from batchinfer.job.spec.spec import JobSpec, ModelSpec
from batchinfer.job.storage.filesystem import LocalFiles


@dataclass(frozen=True)
class RunOptions:
    if_exists: str
    """``resume``, ``error`` or ``overwrite``."""
    retry_errors: bool = False
    update: bool = False
    role: Role | None = None
    """What this run does if several processes share the job; None if it writes alone."""
    has_fleet: bool = False

    @property
    def overwrites(self) -> bool:
        """True if no row of earlier runs is kept."""
        return self.if_exists == "overwrite"


@dataclass(frozen=True)
class RunPlan:
    """What a run has to do. Valid only inside the ``with`` block of ``decide``."""

    job: OutputJob
    """The job. ``job.out`` is the directory that this run writes to, and ``job.manifest`` is the
    stored plan, which is the same for all runs of the job."""
    claim: Claim
    resume: ResumePlan
    outputs: Sequence[OutputDir]
    """Outputs whose rows are copied if the job would compute the same rows."""
    kernels: Mapping[str, str]
    """Kernels of earlier runs, to use again if possible; empty if this run may choose kernels."""
    options: RunOptions


@dataclass(frozen=True)
class NothingToDo:
    out: OutputDir
    reason: str
    is_finished: bool
    """True if the job is finished; False if only this shard has no parts left."""


REFUSED: Mapping[tuple[str, str], JobError] = {
    ("--retry-errors", "--overwrite"): UsageError(
        "--retry-errors keeps the good rows, but --overwrite deletes them; choose one"
    ),
    ("--update", "--overwrite"): UsageError(
        "--update keeps the good rows, but --overwrite deletes them; choose one"
    ),
    ("--worker", "--workers"): UsageError(
        "--worker runs one of several workers, but --workers starts several; choose one"
    ),
    ("--retry-errors", "--worker"): UsageError(
        "--retry-errors cannot be combined with --worker, because other workers "
        "may already be running",
        hint="use --workers N to run the failed rows on several workers, or leave out --worker",
    ),
    ("--update", "--worker"): UsageError(
        "--update cannot be combined with --worker, because the new output "
        "replaces the old one as a whole",
        hint="use --workers N to update with several workers, or leave out --worker",
    ),
    ("--retry-errors", "--shard"): UsageError(
        "--retry-errors cannot be combined with --shard, because another shard "
        "could end the job before this shard has reopened its failed rows",
        hint="leave out --shard; --retry-errors runs only the failed rows",
    ),
    ("--update", "--shard"): UsageError(
        "--update cannot be combined with --shard, because the new output replaces "
        "the old one as a whole",
        hint="leave out --shard; --update runs only the rows that differ",
    ),
}
"""Pairs of options that cannot be combined, and the error that says why."""


def refuse_combinations(options: RunOptions) -> None:
    """Raise UsageError if two of the options cannot be combined (``REFUSED``)."""
    chosen = {
        "--overwrite": options.overwrites,
        "--retry-errors": options.retry_errors,
        "--update": options.update,
        "--shard": options.role is not None and options.role.shard is not None,
        "--worker": options.role is not None and options.role.is_worker,
        "--workers": options.has_fleet,
    }
    for pair, error in REFUSED.items():
        if all(chosen[option] for option in pair):
            raise error.with_traceback(None)


@contextmanager
def decide(
    spec: JobSpec, options: RunOptions, combined_output: PurePath | None
) -> Iterator[RunPlan | NothingToDo]:
    """Look at a job and at its output directory, and decide what a run does.

    The context manager holds the lock of the output directory, or this writer's own lock.

    Args:
        combined_output: a file for the lines of both the OpenAI output file and the error file.

    Raises:
        JobError: the job does not fit its data, or the directory cannot be used for it.
    """
    out = output_at(spec.output.path)
    if options.role is None and not options.overwrites:
        end_swap(out)  # first, because a swap changes which generation is resumed
    job = _open_output_job(spec, out, options, combined_output)
    nothing = _nothing_to_do(job, options)
    if nothing is not None:
        yield nothing
        return
    _refuse_changed_images(job, options)
    claim = _claim(job, options)
    reused = open_outputs(spec.output.reuse, out)
    generated = job.table.generated_schema
    reopen_errors = (lambda o, plan: reopen(o, plan, generated)) if options.retry_errors else None
    with claim.begun(job.manifest, options.if_exists, reopen_errors) as resume:
        _check_partitions(job, resume)
        job = replace(job, manifest=resume.manifest, out=claim.out)
        sources = (claim.out, *resume.takes_over)
        noted = [] if resume.starts_over else filter(None, map(noted_kernels, sources))
        outputs = [*resume.takes_over, *reused]
        yield RunPlan(job, claim, resume, outputs, next(iter(noted), {}), options)


def _open_output_job(
    spec: JobSpec, out: OutputDir, options: RunOptions, combined_output: PurePath | None
) -> OutputJob:
    """Open the job's input and make its plan.

    A table is opened at the version that ``at_version`` chooses, or, with ``--overwrite`` or
    ``--update``, at ``input.version`` or the latest version.
    """
    partitioned.refuse_foreign(out, spec.output.partition_by)
    planned: Manifest | None = None
    with suppress(DataError):
        planned = stored_manifest(out)
    if not (options.overwrites or options.update):
        spec = at_version(spec, planned, out, retry_errors=options.retry_errors)
    _refuse_model_folders(spec.model, out)
    source = open_input(spec)
    _refuse_own_output(source, out)
    source = identified(source, planned)
    job = open_job(spec, source)
    if planned is None or options.overwrites or not planned.is_of_same_job(job.manifest):
        job = with_checked_inputs(job)
        manifest = job.manifest
    else:
        manifest = job.manifest.with_replaced_cells(planned)
    if _compares_images(out, planned, options):
        manifest = replace(manifest, image_files=image_file_facts(spec, source))
    return OutputJob(spec, job.source, job.table, manifest, out, combined_output)


def _compares_images(out: OutputDir, planned: Manifest | None, options: RunOptions) -> bool:
    """Return True if the run stores the facts about image files in its plan, or compares them with
    an earlier plan.

    Processes that share a job do neither, because each of them would have to examine all images. A
    finished job compares images only with ``--update``, ``--overwrite`` or ``--retry-errors``, or
    if an update has begun.
    """
    if options.role is not None:
        return False
    is_finished = planned is not None and out.files.stat(out.success) is not None
    asks = options.overwrites or options.update or options.retry_errors
    return not is_finished or asks or bool(out.files.entries(out.next))


def _refuse_own_output(source: Source, out: OutputDir) -> None:
    """Check that no input file lies in the output, even through a link."""
    for file in source.files:
        if any(out.files.holds(place, file.path) for place in (out.root, out.data)):
            raise UsageError(
                f"output.path: {printable(file.path)} is both an input and an output of this job",
                hint="choose another folder for the output",
            )


def _refuse_model_folders(model: ModelSpec, out: OutputDir) -> None:
    """Check that the output and the model's folders do not contain each other, even through links.
    In a model's folder, files of the output could change the model's fingerprint."""
    places = {"model.name": model.name, "model.tokenizer": model.tokenizer}
    places |= {f"model.adapters.{name}": path for name, path in model.adapters.items()}
    for key, folder in places.items():
        if folder is None or not os.path.isdir(folder):
            continue
        is_inside = LocalFiles().holds(PurePath(folder), str(out.root))
        if is_inside or out.files.holds(out.root, folder):
            relation = "lies in" if is_inside else "contains"
            raise UsageError(
                f"output.path: {printable(str(out.root))} {relation} the folder of {key}, "
                f"{printable(folder)}",
                hint="choose another folder for the output",
            )


def _next_generation(job: OutputJob, options: RunOptions) -> OutputDir | None:
    if options.role is not None or options.overwrites:
        return None
    return next_generation(
        job.out, job.manifest, update=options.update, retry_errors=options.retry_errors
    )


def _refuse_changed_images(job: OutputJob, options: RunOptions) -> None:
    """Check that image files have not changed if the run resumes an output.

    ``--retry-errors`` accepts changed files, because somebody may have replaced damaged images.
    """
    if options.if_exists != "resume" or options.retry_errors or not has_finished_rows(job.out):
        return
    stored = stored_manifest(job.out)
    if stored.is_of_same_job(job.manifest) and _next_generation(job, options) is None:
        stored.check_same_images(job.manifest)


def _nothing_to_do(job: OutputJob, options: RunOptions) -> NothingToDo | None:
    if _next_generation(job, options) is None and _is_finished(job, options):
        if options.update:
            drop_generations(job.out)
        reason = f"nothing to do: {printable(str(job.out.root))} is finished"
        return NothingToDo(job.out, reason, is_finished=True)
    num_parts = len(job.manifest.parts())
    shard = None if options.role is None else options.role.shard
    if shard is not None and not shard.parts(num_parts):
        reason = f"shard {shard} has nothing to do: the job has only {counted(num_parts, 'part')}"
        return NothingToDo(job.out, reason, is_finished=False)
    return None


def _is_finished(job: OutputJob, options: RunOptions) -> bool:
    """Return True if the job is finished, without taking a lock or writing anything. Raise JobError
    if the output belongs to another job or input."""
    out, columns = job.out, job.spec.output.partition_by
    if options.overwrites or not all(map(out.files.stat, (out.success, out.summary))):
        return False
    todo = plan_resume(out, job.manifest, options.if_exists, "times").todo
    exports = job.spec.output.format == "openai-batch"
    if exports and not export_record.exists(out, job.combined_output):
        return False
    if todo or not partitioned.exists(out, columns) or not is_stored_whole(out):
        return False
    if any(missing_files(out)):
        return False
    return not (options.retry_errors and has_errors(out, job.manifest))


def _claim(job: OutputJob, options: RunOptions) -> Claim:
    generation = _next_generation(job, options)
    if generation is not None:
        return Claim(generation, present=job.out)
    role = options.role
    if options.has_fleet:
        role = Role(None if role is None else role.shard, is_launcher=True)
    if role is None:
        return Claim(job.out)
    return SharedClaim(job.out, role, job.spec.engine.order_window)


def _check_partitions(job: OutputJob, resume: ResumePlan) -> None:
    columns = job.spec.output.partition_by
    if resume.begins or not partitioned.exists(job.out, columns):
        partitioned.check_partitions(columns, job.table.kept, job.source)


def at_version(
    spec: JobSpec, planned: Manifest | None, out: OutputDir, *, retry_errors: bool
) -> JobSpec:
    """Return the job with the version of its table that a run without ``--update`` reads.

    If ``input.version`` is not set, an unfinished update continues with its own version. Without an
    unfinished update, the run reads the version with which the output began or, after the job has
    ended, the latest version.

    With ``--retry-errors``, the run reads the latest version if it has as many rows as the version
    with which the output began, because somebody may have corrected the failed rows. If the numbers
    of rows differ, the run reads the version with which the output began, even after the job has
    ended.

    Args:
        planned: the plan of the output in ``out``; None if there is no plan.
        retry_errors: True if failed rows run again.

    Raises:
        JobError: the table cannot be read.
    """
    if spec.input.version is not None:
        return spec
    begun = _of_begun_update(spec, out)
    if begun is not None:
        return begun
    if planned is None or planned.table_version is None:
        return spec
    if not retry_errors and out.files.stat(out.success) is not None:
        return spec
    before = _at(spec, planned.table_version)
    if planned.input_paths != tuple(spec.input.paths) and not _finds_again(before, planned):
        return spec
    return _for_errors(spec, before, planned) if retry_errors else before


def _of_begun_update(spec: JobSpec, out: OutputDir) -> JobSpec | None:
    """Return the job at the version of its unfinished update, if there is one."""
    for path in out.files.entries(out.next):
        with suppress(JobError):
            plan = stored_manifest(out.generation(path.name))
            if plan.table_version is not None:
                candidate = _at(spec, plan.table_version)
                source = identified(open_input(candidate), plan)
                manifest = open_job(candidate, source).manifest
                if replace(manifest, image_files=plan.image_files).name == path.name:
                    return candidate
    return None


def _for_errors(spec: JobSpec, before: JobSpec, planned: Manifest) -> JobSpec:
    latest = open_input(spec)
    if latest.num_rows == planned.num_rows:
        return spec
    print_line(
        f"{printable(', '.join(spec.input.paths))} has changed since this job "
        f"started; failed rows are retried at version {planned.table_version} of "
        f"the table; to read version {latest.version}, use --update",
        to_stderr=True,
    )
    return before


def _at(spec: JobSpec, version: int) -> JobSpec:
    return spec.model_copy(update={"input": spec.input.model_copy(update={"version": version})})


def _finds_again(pinned: JobSpec, planned: Manifest) -> bool:
    """Return True if the table of ``pinned`` is the planned table, moved to another path."""
    with suppress(JobError):
        source = identified(open_input(pinned), planned)
        return have_common_files(planned.inputs, source.files)
    return False
