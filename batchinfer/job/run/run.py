"""``batchinfer run``: from a job to its output directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import PurePath

from batchinfer.console.display import Display
from batchinfer.console.phases import Phases
from batchinfer.errors import ExitCode
from batchinfer.job.claims.generation import NextGeneration
from batchinfer.job.claims.retry import reopen
from batchinfer.job.claims.shared import Role
from batchinfer.job.job import BuildEngine
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.reuse.reuse import open_outputs
from batchinfer.job.run.begin import (
    RunOptions,
    check_folders,
    claim_parts,
    open_output_job,
    refuse_combinations,
)
from batchinfer.job.run.metrics import serve_metrics
from batchinfer.job.run.on_end import notify_on_end
from batchinfer.job.run.parts import RunFleet, run_parts
from batchinfer.job.run.reporter import Report, RunReporter
from batchinfer.job.run.threads import Repeater
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.live import LiveFile, WatchedRun


def run_job(
    spec: JobSpec,
    *,
    overwrite: bool = False,
    retry_errors: bool = False,
    update: bool = False,
    role: Role | None = None,
    quiet: bool = False,
    as_json: bool = False,
    build: BuildEngine | None = None,
    report: Report | None = None,
    combined_output: PurePath | None = None,
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
        role: what this process makes beside others; the last one to end ends the job.
        quiet: print nothing but why the job did not succeed.
        as_json: print the summary as JSON.
        build: makes the engine, in place of ``batchinfer.builders.engine.build_engine``.
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
    options = RunOptions(
        "overwrite" if overwrite else spec.output.if_exists, retry_errors, update, role
    )
    refuse_combinations(options, has_fleet=fleet is not None)
    if fleet is not None:
        role = Role(None if role is None else role.shard, is_launcher=True)
    display = display or Display(quiet=quiet, result_on_stdout=not as_json)
    with ExitStack() as stack:
        phases = stack.enter_context(Phases(display.phases))
        watched = WatchedRun(spec.name, phases)
        reporter = RunReporter(watched, display, as_json, report)
        stack.enter_context(serve_metrics(metrics, watched, display))
        ended = stack.enter_context(notify_on_end(spec, watched, display, alone=role is None))
        job = open_output_job(spec, combined_output, options)
        claim = claim_parts(job, options, has_fleet=fleet is not None)
        if claim is None:
            reporter.nothing_to_do(job.out)
            return ExitCode.OK
        num_parts = len(job.manifest.parts())
        if role is not None and role.shard is not None and not role.shard.parts(num_parts):
            reporter.shard_without_parts(str(role.shard), num_parts)
            return ExitCode.OK
        outputs = open_outputs(job.spec.output.reuse, job.out)
        generated = job.table.generated_schema
        opens = (lambda out, plan: reopen(out, plan, generated)) if retry_errors else None
        resume = stack.enter_context(claim.begun(job.manifest, options.if_exists, opens))
        # an updated output's own folder is deleted once it has replaced the old one
        live_in = job.out if isinstance(claim, NextGeneration) else claim.out
        stack.enter_context(_write_live_status(live_in, watched))
        job = replace(job, manifest=resume.manifest, out=claim.out)
        check_folders(job, resume)
        code = run_parts(
            job, claim, resume, reporter, build, fleet, role, outputs, overwrites=options.overwrites
        )
        ended(code)
        return code


@contextmanager
def _write_live_status(out: OutputDir, watched: WatchedRun) -> Iterator[None]:
    """Write how far the run is every few seconds, for ``batchinfer status``."""
    file = LiveFile(out, watched)
    try:
        with Repeater(file.write, file.every_s):
            yield
    finally:
        file.delete()
