"""The parts that a run makes: rows read back, a model loaded, then the pipeline, or a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Event
from typing import Protocol

from batchinfer.console.meter import Meter
from batchinfer.console.phases import phase
from batchinfer.console.progress import Progress
from batchinfer.errors import ExitCode
from batchinfer.job.claims.claim import Claim
from batchinfer.job.claims.shared import Role
from batchinfer.job.job import BuildEngine, LoadedJob, OutputJob, load
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import ResumePlan
from batchinfer.job.reuse.reuse import RowReuse
from batchinfer.job.run.end import end_run
from batchinfer.job.run.id_errors import store_id_errors, with_id_errors
from batchinfer.job.run.pipeline import run_pipeline
from batchinfer.job.run.reporter import RunReporter
from batchinfer.job.stats.recorder import kernels_of, runs_of
from batchinfer.process.process import gc_paused, stop_signals


class RunFleet(Protocol):
    """``run_pipeline`` with several workers, each a process of its own."""

    def __call__(
        self,
        job: OutputJob,
        role: Role,
        build: BuildEngine | None,
        progress: Progress,
        stop: Event,
        on_begin: Callable[[], None],
    ) -> bool:
        """Make the parts that are not finished; whether all were made.

        Args:
            job: as workers open it.
            role: whose parts they make.
            on_begin: called when rows begin to run.
        """
        ...


def run_parts(
    job: OutputJob,
    claim: Claim,
    resume: ResumePlan,
    reporter: RunReporter,
    build: BuildEngine | None,
    fleet: RunFleet | None,
    role: Role | None,
    outputs: Sequence[OutputDir],
    *,
    overwrites: bool,
) -> ExitCode:
    """Make the parts that are not finished, then end the run.

    Args:
        outputs: may hold rows of them.
        overwrites: whether the command said so: to go on takes one that does not.

    Returns:
        As ``end_run``; INTERRUPTED where not all parts were made.

    Raises:
        JobError: the job cannot be run; finished rows stay.
    """
    if not resume.todo and role is not None and role.has_launcher:
        return ExitCode.OK
    if not resume.todo:
        with stop_signals() as stop:
            return end_run(job, claim, reporter, stop, overwrites=overwrites)
    with phase("reading finished rows"):
        queue = claim.queue(resume, job.table.generated_schema)
    with phase("checking ids"):
        job = with_id_errors(job, reads_stored=not resume.starts_over)
    lost = {f"what was in {name}": problem for name, problem in queue.damaged.items()}
    reporter.damage({**resume.damaged, **lost})
    missing = sum(map(job.source.count, queue.missing))
    meter = reporter.watched.meter = Meter(
        missing, _num_finished(job, resume, missing), draws=job.spec.task_spec.draws
    )
    reporter.resumes(meter.before, meter.before + missing)
    before = _pinned_kernels(job, resume)
    loaded = reuse = None
    outputs = [*resume.takes_over, *outputs]
    runs_here = not missing or fleet is None
    if missing and runs_here:
        if outputs:
            reuse = RowReuse(outputs, job.table.generated_schema, reporter.note)
        loaded = _load(job, build, before, reporter)
    with nullcontext() if loaded is None else closing(loaded):

        def clear() -> None:
            claim.clear(resume)
            store_id_errors(job)
            meter.begin()  # a model is loaded

        if runs_here:
            clear()
        with stop_signals() as stop:
            with closing(reporter.display.progress(meter)) as progress:
                if fleet is not None and not runs_here:
                    seen = _as_workers_see(job, resume, overwrites=overwrites)
                    complete = fleet(seen, role or Role(), build, progress, stop, meter.begin)
                else:
                    complete = run_pipeline(job, queue, loaded, progress, stop, reuse)
            if reuse is not None and not (reuse.num_reused or meter.before):  # else those may be
                reporter.reused_nothing(reuse.why_none(job.manifest.job, missing))
            if not complete:
                reporter.stopped(job.out, overwrites=overwrites)
                return ExitCode.INTERRUPTED
            if role is not None and role.has_launcher:
                return ExitCode.OK
            return end_run(job, claim, reporter, stop, overwrites=overwrites)


def _num_finished(job: OutputJob, resume: ResumePlan, missing: int) -> int:
    """Rows of the parts that this run makes which earlier ones have finished."""
    if resume.starts_over:
        return 0
    parts = job.manifest.parts()
    mine = parts if resume.owned is None else [parts[at] for at in resume.owned]
    return sum(job.source.count(part.rows) for part in mine) - missing


def _as_workers_see(job: OutputJob, resume: ResumePlan, *, overwrites: bool) -> OutputJob:
    """The job with an output that each worker opens by itself: of an update, the next generation,
    which reuses the rows of those it takes the place of."""
    asked = job.spec.output
    changes: dict[str, object] = {"if_exists": "overwrite"} if overwrites else {}
    if resume.takes_over:
        reuse = (*(str(out.root) for out in resume.takes_over), *asked.reuse)
        changes |= {"path": str(job.out.root), "reuse": reuse, "if_exists": "resume"}
    output = asked.model_copy(update=changes)
    return replace(job, spec=job.spec.model_copy(update={"output": output}))


def _pinned_kernels(job: OutputJob, resume: ResumePlan) -> Mapping[str, str]:
    """Of the runs whose rows stay."""
    if resume.starts_over:
        return {}
    return kernels_of(chain.from_iterable(map(runs_of, (*resume.takes_over, job.out))))


def _load(
    job: OutputJob, build: BuildEngine | None, before: Mapping[str, str], reporter: RunReporter
) -> LoadedJob | None:
    """The model of a job, told of where it computes in another way than before."""
    with gc_paused():
        loaded = load(job, _like_before(build or _default_builder(), before))
    if loaded is not None:
        reporter.other_kernels(before, loaded.context.kernels)
    return loaded


def _default_builder() -> BuildEngine:
    with phase("importing torch"):  # only where there is work to do
        from batchinfer.builders.engine import build_engine

    return build_engine


def _like_before(build: BuildEngine, before: Mapping[str, str]) -> BuildEngine:
    """Have the engine compute as the runs did whose rows stay."""
    return partial(build, pinned_kernels=before) if before else build
