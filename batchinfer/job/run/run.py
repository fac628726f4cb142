"""``batchinfer run``: from a job to its output directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import pyarrow as pa

from batchinfer.console.display import Display, TextDisplay
from batchinfer.console.format import printable
from batchinfer.console.meter import Meter
from batchinfer.console.phases import Phases, phase
from batchinfer.console.progress import Progress
from batchinfer.errors import DataError, ExitCode, JobError, NotYetError, UsageError
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.identity import have_common_files
from batchinfer.job.job import BuildEngine, OutputJob, identified, load, open_input, open_job
from batchinfer.job.manifest import Manifest
from batchinfer.job.openai.export import export
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.export_record import is_there
from batchinfer.job.output.manifest_file import is_stored_whole, stored_manifest
from batchinfer.job.output.open import output_at
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.output.partitioned.columns import check_partitions
from batchinfer.job.output.partitioned.record import is_there as is_partitioned
from batchinfer.job.output.partitioned.record import refuse_foreign
from batchinfer.job.output.partitioned.write import write_partitions
from batchinfer.job.output.resume import (
    RecoveredRows,
    ResumePlan,
    from_scratch,
    plan_resume,
    recover_rows,
    refuse_unexpected_files,
)
from batchinfer.job.output.retry import has_errors, reopen
from batchinfer.job.reuse.reuse import RowReuse, open_outputs
from batchinfer.job.row_ids import Part
from batchinfer.job.run.id_errors import store_id_errors, with_id_errors
from batchinfer.job.run.metrics import told_metrics
from batchinfer.job.run.on_end import telling_at_end
from batchinfer.job.run.pipeline import run_pipeline
from batchinfer.job.run.reporter import Report, RunReporter
from batchinfer.job.run.threads import Repeater
from batchinfer.job.shards.claim import Claim, OneShard, WholeJob
from batchinfer.job.shards.shard import Shard
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.lineage import run_event
from batchinfer.job.stats.live import LiveFile, WatchedRun
from batchinfer.job.stats.recorder import kernels_of, package_versions, runs_of
from batchinfer.job.stats.summary import write_summary
from batchinfer.job.update.claim import (
    NextGeneration,
    drop_generations,
    end_swap,
    next_generation,
)
from batchinfer.process import gc_paused, stop_signals


class RunFleet(Protocol):
    """``run_pipeline`` with several workers, each with an engine that it builds itself."""

    def __call__(
        self,
        job: OutputJob,
        recovered: RecoveredRows,
        build: BuildEngine | None,
        kernels_before: Mapping[str, str],
        clear: Callable[[], None],
        progress: Progress,
        stop: Event,
    ) -> bool:
        """Make the parts that are not finished; whether all were made.

        Args:
            kernels_before: of the runs whose rows stay.
            clear: deletes what is to be overwritten; to be called once a model is loaded.
        """
        ...


def run_job(
    spec: JobSpec,
    *,
    overwrite: bool = False,
    retry_errors: bool = False,
    update: bool = False,
    shard: Shard | None = None,
    quiet: bool = False,
    as_json: bool = False,
    build: BuildEngine | None = None,
    report: Report | None = None,
    combined_output: Path | None = None,
    fleet: RunFleet | None = None,
    display: Display | None = None,
    metrics: str | None = None,
) -> ExitCode:
    """Run a job, or what is left of it, and write its output directory.

    Everything that needs no model is checked before one is loaded; output that is overwritten stays
    until one is.

    Args:
        overwrite: start over, as with ``output.if_exists: overwrite``.
        retry_errors: run the rows again that ended in an error; what else differs is updated.
        update: where the job or its input differ from what the output was made of, make it anew
            beside that, and put it in its place when it is made.
        shard: make its parts alone, beside other shards; the last one to end ends the job.
        quiet: print nothing but why the job did not succeed.
        as_json: print the summary as JSON.
        build: makes the engine, in place of ``batchinfer.build.build_engine``.
        report: writes ``report.html`` of a job that has ended, if it can; None: there is none.
        combined_output: a file for all of OpenAI's output and error lines, with that
            ``output.format``.
        fleet: runs the job on several workers; None: it runs here, on one.
        display: where the run is told of; None: as text, here.
        metrics: a port, ``host:port`` or a file for Prometheus metrics; None: there are none.

    Returns:
        OK, TOO_MANY_ROW_ERRORS or INTERRUPTED.

    Raises:
        JobError: the job cannot be run; finished rows stay.
    """
    if_exists = "overwrite" if overwrite else spec.output.if_exists
    display = display or TextDisplay(quiet=quiet, result_on_stdout=not as_json)
    with Phases(display.phases) as phases:
        watched = WatchedRun(spec.name, phases)
        with told_metrics(metrics, watched, display):
            reporter = RunReporter(watched, display, as_json, report)

            def run() -> ExitCode:
                if shard is None and if_exists != "overwrite":
                    end_swap(output_at(spec.output.path))  # first: it decides what is gone on with
                goes_on = if_exists != "overwrite" and not (update or retry_errors)
                job = _open(spec, combined_output, keeps_version=goes_on)
                return _run_opened(
                    job, if_exists, reporter, retry_errors, update, shard, build, fleet
                )

            return telling_at_end(spec, watched, display, run, alone=shard is None)


def _run_opened(
    job: OutputJob,
    if_exists: str,
    reporter: RunReporter,
    retry_errors: bool,
    update: bool,
    shard: Shard | None,
    build: BuildEngine | None,
    fleet: RunFleet | None,
) -> ExitCode:
    """Run what is left of a job."""
    _check_options(if_exists, retry_errors, update, shard, fleet)
    generation = None
    if shard is None and if_exists != "overwrite":
        generation = next_generation(
            job.out, job.manifest, update=update, retry_errors=retry_errors
        )
    if generation is not None:
        if fleet is not None:
            raise NotYetError("updating an output with scale.workers over 1")
        claim: Claim = NextGeneration(job.out, generation)
    elif _is_finished(job, if_exists) and not (retry_errors and has_errors(job.out, job.manifest)):
        if update:
            drop_generations(job.out)
        reporter.nothing_to_do(job.out)
        return ExitCode.OK
    else:
        claim = WholeJob(job.out) if shard is None else OneShard(job.out, shard)
    if shard is not None and not shard.parts(len(job.manifest.parts())):
        reporter.shard_without_parts(str(shard), len(job.manifest.parts()))
        return ExitCode.OK
    outputs = open_outputs(job.spec.output.reuse, job.out)
    told_in = claim.out if generation is None else job.out  # a generation's folder goes in the end
    with claim.begun(job.manifest, if_exists) as resume, _told_live(told_in, reporter.watched):
        job = replace(job, manifest=resume.manifest, out=claim.out)
        if retry_errors:
            reopen(job.out, job.manifest, job.table.generated_schema)
            reopened = plan_resume(job.out, job.manifest, "resume")
            resume = replace(reopened, takes_over=resume.takes_over)
        columns = job.spec.output.partition_by
        if resume.begins or not is_partitioned(job.out, columns):
            check_partitions(columns, job.table.kept, job.source)
        if not resume.todo:
            with stop_signals() as stop:
                return _end(job, claim, if_exists, reporter, stop)
        return _run(job, claim, resume, if_exists, reporter, build, fleet, outputs)


def _check_options(
    if_exists: str,
    retry_errors: bool,
    update: bool,
    shard: Shard | None,
    fleet: RunFleet | None,
) -> None:
    for option, is_given in {"--retry-errors": retry_errors, "--update": update}.items():
        if is_given and if_exists == "overwrite":
            raise UsageError(f"{option} keeps the good rows, --overwrite keeps none: choose one")
    if fleet is not None and shard is not None:
        raise NotYetError("--shard with scale.workers over 1")
    if retry_errors and shard is not None:
        raise UsageError(
            "--retry-errors is not for a shard: its siblings would end the job before theirs are "
            "open again",
            hint="run it without --shard: it runs the rows alone that ended in an error",
        )
    if update and shard is not None:
        raise UsageError(
            "--update is not for a shard: the output is put in place as a whole",
            hint="run it without --shard: it runs the rows alone that differ",
        )


@contextmanager
def _told_live(out: OutputDir, watched: WatchedRun) -> Iterator[None]:
    """Write how far the run is every few seconds, for whoever looks."""
    file = LiveFile(out, watched)
    try:
        with Repeater(file.write, file.every_s):
            yield
    finally:
        file.delete()


def _open(spec: JobSpec, combined_output: Path | None, *, keeps_version: bool) -> OutputJob:
    """A job on its data; of a table, on the version that it was begun with, or on the latest."""
    out = output_at(spec.output.path)
    refuse_foreign(out, spec.output.partition_by)
    planned = _planned_before(out)
    if keeps_version:
        spec = _pinned(spec, planned, out)
    source = open_input(spec)
    _refuse_own_output(source, out)
    source = identified(source, planned)
    job = open_job(spec, source)
    return OutputJob(spec, source, job.table, job.manifest, out, combined_output)


def _pinned(spec: JobSpec, planned: Manifest | None, out: OutputDir) -> JobSpec:
    """The job on the version of a table that it was begun with, until it has ended."""
    if spec.input.version is not None or planned is None or planned.table_version is None:
        return spec
    if out.files.stat(out.success) is not None:
        return spec
    version = {"version": planned.table_version}
    pinned = spec.model_copy(update={"input": spec.input.model_copy(update=version)})
    if planned.input_paths == tuple(spec.input.paths) or _finds_again(pinned, planned):
        return pinned
    return spec


def _finds_again(spec: JobSpec, planned: Manifest) -> bool:
    """Whether a table that was somewhere else is the one that was planned, not another one."""
    with suppress(JobError):
        source = identified(open_input(spec), planned)
        return have_common_files(planned.inputs, source.files)
    return False


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


def _run(
    job: OutputJob,
    claim: Claim,
    resume: ResumePlan,
    if_exists: str,
    reporter: RunReporter,
    build: BuildEngine | None,
    fleet: RunFleet | None,
    outputs: Sequence[OutputDir],
) -> ExitCode:
    """Make the parts that are not finished; ``outputs`` may hold rows of them."""
    recover = from_scratch if resume.starts_over else recover_rows
    with phase("reading finished rows"):
        recovered = recover(job.out, resume, job.table.generated_schema)
    with phase("checking ids"):
        job = with_id_errors(job, reads_stored=not resume.starts_over)
    lost = {f"what was in {name}": problem for name, problem in recovered.damaged.items()}
    reporter.damage({**resume.damaged, **lost})
    missing = sum(map(job.source.count, recovered.missing))
    meter = reporter.watched.meter = Meter(missing, _num_finished(job, resume, missing))
    reporter.resumes(meter.before, meter.before + missing)
    loaded = None
    outputs = [*resume.takes_over, *outputs]
    runs = chain.from_iterable(map(runs_of, (*resume.takes_over, job.out)))
    before = {} if resume.starts_over else kernels_of(runs)
    reuse = None
    if missing and fleet is None:
        if outputs:
            reuse = RowReuse(outputs, job.table.generated_schema, reporter.note)
        with gc_paused():
            loaded = load(job, _like_before(build or _default_builder(), before))
        if loaded is not None:
            reporter.other_kernels(before, loaded.context.kernels)
    with nullcontext() if loaded is None else closing(loaded):

        def clear() -> None:
            claim.clear(resume)
            store_id_errors(job)
            meter.begin()  # a model is loaded

        runs_here = not missing or fleet is None
        if runs_here:
            clear()
        with stop_signals() as stop:
            with closing(reporter.display.progress(meter)) as progress:
                if fleet is not None and not runs_here:
                    complete = fleet(job, recovered, build, before, clear, progress, stop)
                else:
                    complete = run_pipeline(job, recovered, loaded, progress, stop, reuse)
            if reuse is not None and not (reuse.num_reused or meter.before):  # else those may be
                reporter.reused_nothing(reuse.why_none(job.manifest.job, missing))
            if not complete:
                reporter.stopped(job.out, overwrites=if_exists == "overwrite")
                return ExitCode.INTERRUPTED
            return _end(job, claim, if_exists, reporter, stop)


def _num_finished(job: OutputJob, resume: ResumePlan, missing: int) -> int:
    """Rows of the parts that this run makes which earlier ones have finished."""
    if resume.starts_over:
        return 0
    parts = job.manifest.parts()
    mine = parts if resume.owned is None else [parts[at] for at in resume.owned]
    return sum(job.source.count(part.rows) for part in mine) - missing


def _default_builder() -> BuildEngine:
    with phase("importing torch"):  # only where there is work to do
        from batchinfer.build import build_engine

    return build_engine


def _like_before(build: BuildEngine, before: Mapping[str, str]) -> BuildEngine:
    """Have the engine compute as the runs did whose rows stay."""
    return partial(build, kernels_before=before) if before else build


def _is_finished(job: OutputJob, if_exists: str) -> bool:
    """Whether the job is finished, found without a lock or the right to write.

    Raises:
        JobError: what is finished is another job, or of another input.
    """
    if if_exists == "overwrite" or not _claims_success(job.out):
        return False
    todo = plan_resume(job.out, job.manifest, if_exists, "times").todo
    if _exports(job) and not is_there(job.out, job.combined_output):
        return False
    if not is_partitioned(job.out, job.spec.output.partition_by):
        return False
    return not todo and is_stored_whole(job.out)


def _claims_success(out: OutputDir) -> bool:
    return all(out.files.stat(path) is not None for path in (out.success, out.summary))


def _exports(job: OutputJob) -> bool:
    return job.spec.output.format == "openai-batch"


def _end(
    job: OutputJob, claim: Claim, if_exists: str, reporter: RunReporter, stop: Event
) -> ExitCode:
    """End a run that has made its parts, and the job, where nobody else has any to make."""
    with claim.ending(stop) as ending:
        if ending.is_stopped:
            reporter.stopped(job.out, overwrites=if_exists == "overwrite")
            return ExitCode.INTERRUPTED
        if ending.is_ours:
            return _finish(replace(job, out=ending.out), claim, reporter)
        reporter.parts_left(job.out, ending.others_left)
        return ExitCode.OK


def _finish(job: OutputJob, claim: Claim, reporter: RunReporter) -> ExitCode:
    """Write the statistics of a job whose parts are made, and _SUCCESS if few rows failed."""
    refuse_unexpected_files(job.out, job.manifest)
    records = job.out.of_each(partial(_record, job, claim), job.manifest.parts())
    if _exports(job):
        export(job.out, job.manifest, job.table.kept, job.spec.model, job.combined_output)
    columns = job.spec.output.partition_by
    if columns or not is_partitioned(job.out, columns):  # of what was there parts may be newer
        write_partitions(job.out, job.manifest, columns)
    warnings = _nothing_selected(job)
    with phase("merging statistics"):
        lineage_of = partial(_lineage, job, records)
        summary = write_summary(job.out, job.manifest, records, warnings.append, lineage_of)
    reporter.end(job.out, summary, warnings)
    job.out.empty(job.out.segments)
    job.out.empty(job.out.tokens)
    job.source.check_unchanged()
    rows, limit = summary["rows"], job.spec.errors.max_error_rate
    if _too_many_failed(job, rows):
        reporter.too_many_errors(job.out, rows, limit)
        return ExitCode.TOO_MANY_ROW_ERRORS
    job.out.write(job.out.success, b"")
    return ExitCode.OK


def _too_many_failed(job: OutputJob, rows: Mapping[str, Any]) -> bool:
    return bool(rows["error"] > job.spec.errors.max_error_rate * rows["total"])


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
    """A line to say where a filter leaves nothing to run: most often it is misspelt."""
    chosen = job.spec.input
    if chosen.filter is None or chosen.limit == 0 or job.source.num_rows:
        return []
    there = sum(file.num_rows for file in job.source.files)
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
