"""``batchinfer run``: from a job to its output directory."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from pathlib import Path

from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.fingerprint import fingerprint, fingerprint_facts
from batchinfer.job.ids import check_unique_ids
from batchinfer.job.manifest import Manifest
from batchinfer.job.model_facts import model_facts
from batchinfer.job.order import check_prompt_source
from batchinfer.job.output import OutputDir
from batchinfer.job.pipeline import BuildEngine, Job, make_parts
from batchinfer.job.progress import make_progress, say, summary_lines, too_many_errors
from batchinfer.job.signals import stop_signals
from batchinfer.job.source import open_source
from batchinfer.job.spec import JobSpec
from batchinfer.job.summary import write_summary
from batchinfer.job.table import output_table


def run_job(
    spec: JobSpec,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    build: BuildEngine | None = None,
) -> ExitCode:
    """Run a job, or what is left of it, and write its output directory.

    Everything that needs no model is checked before one is loaded.

    Args:
        spec: the job.
        overwrite: start over, as with ``output.if_exists: overwrite``.
        quiet: print nothing but why the job did not succeed.
        build: makes the engine, in place of ``batchinfer.build.build_engine``.

    Returns:
        OK, TOO_MANY_ROW_ERRORS or INTERRUPTED.

    Raises:
        JobError: the job cannot be run; finished parts stay.
    """
    job = _look(spec)
    with stop_signals() as stop, job.out.locked():
        todo = job.out.begin(job.manifest, "overwrite" if overwrite else spec.output.if_exists)
        if not todo:
            return _nothing_to_do(job, quiet)
        if spec.input.id_column is not None and len(todo) == len(job.manifest.parts()):
            check_unique_ids(job.source, spec.input.id_column)
        num_rows = sum(len(part.rows) for part in todo)
        with closing(make_progress(num_rows, quiet=quiet)) as progress:
            complete = make_parts(job, todo, build or _default_builder(), progress, stop)
        if not complete:
            say("stopped; run the same command again to go on", to_stderr=True)
            return ExitCode.INTERRUPTED
        return _finish(job, quiet)


def _default_builder() -> BuildEngine:
    from batchinfer.build import build_engine  # imports torch: only where there is work to do

    return build_engine


def _look(spec: JobSpec) -> Job:
    """Check data, columns and model files against the job, without changing anything."""
    source, out = open_source(spec.input.paths, spec.input.limit), OutputDir(Path(spec.output.path))
    for file in source.files:
        if out.data in Path(file.path).parents:
            raise UsageError(f"output.path: {file.path} is both input and output of this job")
    check_prompt_source(spec.prompt, source.schema.names)
    table = output_table(source, spec)
    facts = model_facts(spec.model)
    manifest = Manifest(
        fingerprint(spec, facts),
        fingerprint_facts(spec, facts),
        source.files,
        source.num_rows,
        spec.output.rows_per_part,
        datetime.now().isoformat(timespec="seconds"),
    )
    return Job(spec, source, table, manifest, out)


def _nothing_to_do(job: Job, quiet: bool) -> ExitCode:
    if job.out.success.exists() and job.out.summary.exists():
        if not quiet:
            say(f"nothing to do: {job.out.root} is finished")
        return ExitCode.OK
    return _finish(job, quiet)


def _finish(job: Job, quiet: bool) -> ExitCode:
    """All parts are there: write the statistics, and _SUCCESS if few enough rows failed."""
    summary = write_summary(job.out, job.manifest)
    if not quiet:
        for line in summary_lines(summary, job.out.root):
            say(line)
    rows, limit = summary["rows"], job.spec.errors.max_error_rate
    if rows["error"] > limit * rows["total"]:
        say(too_many_errors(rows, limit, job.out.root), to_stderr=True)
        return ExitCode.TOO_MANY_ROW_ERRORS
    job.out.write(job.out.success, b"")
    return ExitCode.OK
