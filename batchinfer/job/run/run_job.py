"""``batchinfer run``: runs or resumes a job.

``_batchinfer/bad_ids.parquet`` lists the rows whose value in the id column is missing or repeated,
so that later runs need not read all ids again. If the file is missing or damaged, or belongs to
another input, a run looks for these rows in the input again.
"""

from __future__ import annotations

import gc
import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import PurePath
from threading import Event

import numpy as np
import pyarrow as pa

from batchinfer.console.meter import Meter
from batchinfer.console.phases import Phases, phase
from batchinfer.console.progress_bar import Progress
from batchinfer.console.text_view import Display
from batchinfer.errors import ExitCode
from batchinfer.job.claims.kernels import note_kernels
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.input.unique_ids import BadIds, find_bad_ids
from batchinfer.job.job import BuildEngine, LoadedJob, OutputJob, load
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.reuse.reuse import RowReuse
from batchinfer.job.row_ranges import Part
from batchinfer.job.run.decide import NothingToDo, RunOptions, RunPlan, decide, refuse_combinations
from batchinfer.job.run.finish_job import end_run
from batchinfer.job.run.metrics import serve_metrics
from batchinfer.job.run.on_end import notify_on_end
from batchinfer.job.run.pipeline import run_pipeline
from batchinfer.job.run.reporter import Report, RunReporter
from batchinfer.job.run.threads import Repeater
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.live import LiveFile, WatchedRun
from batchinfer.process.process import gc_paused, stop_signals

_ATTENTION = "attention"
"""Key of the attention kernel in ``EngineContext.kernels``; the machine alone decides this kernel.
"""

_KEY = b"batchinfer.ids_of"


RunFleet = Callable[
    [OutputJob, Role, BuildEngine | None, Progress, Event, Callable[[], None]], bool
]
"""Runs a job like ``run_pipeline``, but with several workers, each in its own process."""


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
    """Run or resume a job, and write its output directory.

    The run checks as much as it can before it loads the model. Output that the run overwrites is
    deleted only after the model is loaded.

    Args:
        overwrite: start over, as with ``output.if_exists: overwrite``.
        retry_errors: run failed rows again; also update the output if the job or input has changed.
        update: if the job or input has changed, make a new output, and replace the existing output
            once the new output is complete.
            role: what this process does if several processes share the job; None if it runs alone.
        quiet: print errors only.
        as_json: print the summary as JSON.
        build: makes the engine; None for ``batchinfer.builders.engine.build_engine``.
        report: writes ``report.html`` at the end of the job; None for no report.
        combined_output: a file for the lines of both the OpenAI output file and the error file, if
            ``output.format`` is ``openai-batch``.
        fleet: runs the job on several workers; None to run it in this process.
        display: shows the progress; None for text on this process's terminal.
        metrics: a port, ``host:port`` or a file for Prometheus metrics; None for no metrics.

    Returns:
        OK, TOO_MANY_ROW_ERRORS or INTERRUPTED.

    Raises:
        JobError: the job cannot be run; finished rows are kept.
        OSError: the summary cannot be written to stdout; the output is complete.
    """
    if_exists = "overwrite" if overwrite else spec.output.if_exists
    options = RunOptions(if_exists, retry_errors, update, role, has_fleet=fleet is not None)
    refuse_combinations(options)
    display = display or Display(quiet=quiet, result_on_stdout=not as_json)
    with ExitStack() as stack:
        phases = stack.enter_context(Phases(display.phases))
        watched = WatchedRun(spec.name, phases)
        reporter = RunReporter(watched, display, as_json, report)
        stack.enter_context(serve_metrics(metrics, watched, display))
        ended = stack.enter_context(notify_on_end(spec, watched, display, alone=role is None))
        plan = stack.enter_context(decide(spec, options, combined_output))
        if isinstance(plan, NothingToDo):
            reporter.nothing_to_do(plan.out, plan.reason, is_finished=plan.is_finished)
            code = ExitCode.OK
        else:
            # Write to the existing output, because an update deletes its own generation at the end.
            stack.enter_context(_write_live_status(plan.claim.present or plan.job.out, watched))
            code = _make_parts(plan, reporter, build, fleet)
            ended(code)
    reporter.print_json()  # last, because a stdout error must change neither the job nor on_end
    return code


@contextmanager
def _write_live_status(out: OutputDir, watched: WatchedRun) -> Iterator[None]:
    """Write the progress of the run every few seconds, for ``batchinfer status``."""
    file = LiveFile(out, watched)
    try:
        with Repeater(file.write, file.every_s):
            yield
    finally:
        file.delete()


def _make_parts(
    plan: RunPlan, reporter: RunReporter, build: BuildEngine | None, fleet: RunFleet | None
) -> ExitCode:
    """Write the unfinished parts, then end the run; return INTERRUPTED if parts are left."""
    job, resume = plan.job, plan.resume
    if not resume.todo:
        with stop_signals() as stop:
            return end_run(plan, job, reporter, stop)
    with phase("reading finished rows"):
        queue = plan.claim.queue(resume, job.table.generated_schema)
    with phase("checking ids"):
        job = with_id_errors(job, reads_stored=not resume.starts_over)
    unread = {f"the rows of {name}": problem for name, problem in queue.damaged.items()}
    reporter.damage({**resume.damaged, **unread})
    missing_of = _missing_rows(job, queue.missing)
    missing = missing_of.total()
    before = sum(job.source.count(part.rows) for part in resume.parts) - missing
    draws = job.spec.task_spec.draws
    meter = Meter(missing, 0 if resume.starts_over else before, draws=draws)
    reporter.watched.meter = meter
    reporter.resumes(meter.before, meter.before + missing)

    def count_elsewhere(parts: Sequence[Part]) -> None:
        rows = sum(missing_of[part.index] for part in parts)
        meter.before += rows
        meter.total -= rows

    queue.on_made_elsewhere = count_elsewhere
    runs_here = not missing or fleet is None
    loaded = reuse = None
    if runs_here and missing:
        if plan.outputs:
            reuse = RowReuse(plan.outputs, job.table.generated_schema, reporter.note)
        loaded = _load_model(plan, job, build, reporter)
    elif runs_here:
        plan.claim.clear(resume)
    with nullcontext() if loaded is None else closing(loaded), stop_signals() as stop:
        if runs_here:
            store_id_errors(job)
            meter.begin()
        with closing(reporter.display.progress(meter)) as progress:
            if fleet is not None and not runs_here:
                seen, role = _as_workers_see(plan, job), plan.options.role or Role()
                complete = fleet(seen, role, build, progress, stop, meter.begin)
            else:
                complete = run_pipeline(job, queue, loaded, progress, stop, reuse)
        # If earlier runs finished rows, say nothing, because those runs may have reused rows.
        if reuse is not None and not (reuse.num_reused or meter.before):
            reporter.reused_nothing(reuse.why_none(job.manifest.job, missing))
        if not complete:
            reporter.stopped(job.out, overwrites=plan.options.overwrites)
            return ExitCode.INTERRUPTED
        return end_run(plan, job, reporter, stop)


def _missing_rows(job: OutputJob, missing: Sequence[range]) -> Counter[int]:
    """Count the missing rows, keyed by the part's index; each range is within one part."""
    first_rows = [part.rows.start for part in job.manifest.parts()]
    counts = Counter[int]()
    for rows in missing:
        counts[bisect_right(first_rows, rows.start) - 1] += job.source.count(rows)
    return counts


def _as_workers_see(plan: RunPlan, job: OutputJob) -> OutputJob:
    """Return the job with the settings that workers use to open the output.

    In an update, workers open the next generation, which reuses rows of the outputs that it
    replaces.
    """
    output = job.spec.output
    changes: dict[str, object] = {"if_exists": "overwrite"} if plan.options.overwrites else {}
    if plan.resume.takes_over:
        reuse = (*(str(out.root) for out in plan.resume.takes_over), *output.reuse)
        changes |= {"path": str(job.out.root), "reuse": reuse, "if_exists": "resume"}
    update = {"output": output.model_copy(update=changes)}
    return replace(job, spec=job.spec.model_copy(update=update))


def _load_model(
    plan: RunPlan, job: OutputJob, build: BuildEngine | None, reporter: RunReporter
) -> LoadedJob:
    """Load the model with the kernels of the job, then delete output that the run overwrites.

    The first process to load the model notes its kernels. If another process then finds this note
    and has chosen other kernels, it loads the model again with the noted kernels.
    """
    build = build or _default_builder()
    loaded = _load(job, build, plan.kernels)
    kernels = loaded.context.kernels
    try:
        plan.claim.clear(plan.resume)
        with plan.claim.locked() as out:
            noted = note_kernels(out, kernels)
    except BaseException:
        loaded.close()
        raise
    linear = kernels.keys() - {_ATTENTION}
    if noted != plan.kernels and any(
        noted.get(name, kernels[name]) != kernels[name] for name in linear
    ):
        loaded.close()
        del loaded
        gc.collect()  # otherwise, two models would be in memory
        loaded = _load(job, build, noted)
    reporter.other_kernels(plan.kernels or noted, loaded.context.kernels)
    return loaded


def _load(job: OutputJob, build: BuildEngine, kernels: Mapping[str, str]) -> LoadedJob:
    with gc_paused():
        loaded = load(job, partial(build, pinned_kernels=kernels) if kernels else build)
    assert loaded is not None, "the job has rows to run"
    return loaded


def _default_builder() -> BuildEngine:
    with phase("importing torch"):  # imported only if there are rows to run
        from batchinfer.builders.engine import build_engine

    return build_engine


def with_id_errors(job: OutputJob, *, reads_stored: bool) -> OutputJob:
    """Return the job with a list of the rows that fail because their ids are missing or repeated.

    Args:
        reads_stored: True to use the list in ``bad_ids.parquet`` if it belongs to this job's input.

    Raises:
        DataError: the ids cannot be read, or have an unsupported type.
    """
    column = job.spec.input.id_column
    if column is None:
        return job
    stored = _stored(job, column) if reads_stored else None
    bad = find_bad_ids(job.source, column) if stored is None else stored
    return replace(job, source=replace(job.source, bad_ids=bad))


def store_id_errors(job: OutputJob) -> None:
    """Write the rows with bad ids to ``bad_ids.parquet``, unless the file holds them already."""
    bad = job.source.bad_ids
    if bad is None or _stored(job, bad.column) is not None:
        return
    table = pa.table({"row_id": bad.rows, "first_row_id": bad.firsts})
    job.out.write_table(job.out.bad_ids, table.replace_schema_metadata({_KEY: _input_key(job)}))


def _stored(job: OutputJob, column: str) -> BadIds | None:
    """Read ``bad_ids.parquet``; return None if it is unreadable or belongs to another input."""
    try:
        table = job.out.read_table(job.out.bad_ids)
        if (table.schema.metadata or {}).get(_KEY) != _input_key(job):
            return None
        rows, firsts = (table[name].to_numpy() for name in ("row_id", "first_row_id"))
    except (OSError, KeyError, pa.ArrowException):
        return None
    return BadIds(column, rows.astype(np.int64), firsts.astype(np.int64))


def _input_key(job: OutputJob) -> bytes:
    contents = attrgetter("size", "num_rows", "content_sha256", "content_hash", "etag")
    files = list(map(contents, job.manifest.inputs))
    selection = job.spec.input
    facts = [selection.id_column, selection.filter, job.source.num_rows]
    return (
        hashlib.sha256(json.dumps([*facts, job.manifest.fingerprint, files]).encode())
        .hexdigest()
        .encode()
    )
