"""``batchinfer plan``: what a job will need, from its data, tokenizer and model config.

The job's own scheduler runs the job's own rows in the job's own order, over a runner that computes
nothing and a clock that a roofline sets (``batchinfer.engine.simulate.roofline`` says what it
leaves out). Blocks, rows in flight, sharing, waste and preemptions are therefore those of the run,
as far as output lengths are known: every sample is taken to run to ``max_tokens``, or to end at
``--expect-output-tokens``.

Time is bounded: ids are looked at where there are at most ``unique_ids.HASHES_AT_ONCE``, at most
``census.MAX_ROWS`` rows and ``MAX_PROMPT_TOKENS`` prompt tokens are
read, at most ``simulation.MAX_STEPS`` steps and ``MAX_OUTPUT_TOKENS`` output tokens simulated. Sums
are then scaled to the whole dataset, and ``sampled`` says of how much they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchinfer.console.format import did_you_mean
from batchinfer.engine.simulate.roofline import DEVICES, Device
from batchinfer.errors import UsageError
from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.input.unique_ids import HASHES_AT_ONCE, find_bad_ids
from batchinfer.job.job import Job, LoadedJob, load, open_input, open_job, row_keys
from batchinfer.job.manifest import Manifest
from batchinfer.job.model_files.facts import model_facts
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import plan_of
from batchinfer.job.plan.census import MAX_PROMPT_TOKENS, MAX_ROWS, Census, sampled_parts
from batchinfer.job.plan.estimate import Outcome, fleet_facts
from batchinfer.job.plan.simulation import ExpectedLengths, FixedLengths, Simulation
from batchinfer.job.reuse.reuse import RowReuse, open_outputs
from batchinfer.job.rows.reader import read_prompts
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.rows.window import plan_windows
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow

if TYPE_CHECKING:
    from batchinfer.builders.dry import SimulatedEngine


def plan_job(
    spec: JobSpec,
    *,
    device: str | None = None,
    expect_output_tokens: int | None = None,
    workers: int | None = None,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """A forecast of what a run of the whole job needs, as JSON data. Writes nothing.

    Args:
        device: a name of ``DEVICES``; None: the one that ``engine.device`` means here.
        expect_output_tokens: tokens of each sample; None: ``max_tokens``, an upper bound.
        workers: devices that share the job; None: ``scale.workers``, and one for ``auto``.
        price_per_hour: of one of them; None: no cost is told.

    With ``output.reuse`` the model's files are hashed, which what is reused must be of.

    Raises:
        JobError: as a run would, as far as weights and the device's presence do not matter.
        UsageError: no such device.
    """
    chosen = None if device is None else _device(device)
    outputs = open_outputs(spec.output.reuse, own=None)
    if spec.accept is not None:  # an upper bound, as max_tokens is
        most = replace(spec.sampling, n=spec.accept.max_tries)
        spec = spec.model_copy(update={"sampling": most})
        outputs = []  # whose rows have other keys than these
    job = open_job(spec, open_input(spec), facts_of=model_facts if outputs else None)
    job = _with_id_errors(job)
    job = replace(job, manifest=_at_its_time(job.manifest, outputs, spec.output.path))
    reuse = RowReuse(outputs, job.table.generated_schema, _ignore) if outputs else None
    from batchinfer.builders.dry import build_dry_engine, device_of  # imports torch

    context = build_dry_engine(
        spec.model.config(TASKS[spec.task].runner(spec)),
        spec.engine,
        chosen or device_of(spec.engine),
        end_after=expect_output_tokens,
    )
    loaded = load(job, lambda *_, **__: context)
    with nullcontext() if loaded is None else closing(loaded):
        task = None if loaded is None else loaded.task
        lengths = _lengths(spec, context, task, expect_output_tokens)
        census = Census(lengths, 0 if task is None else task.result_bytes)
        most_waiting = 2 * spec.engine.max_num_seqs
        simulation = Simulation(
            context.engine, context.runner, context.block_size, lengths, most_waiting
        )
        batches: Iterator[list[PromptRow]] = iter(())
        if loaded is not None:
            batches = _rows(job, loaded, census, reuse)
        complete = simulation.run(batches)
        for _ in batches:  # what the simulation did not come to is counted all the same
            pass
    plan = Outcome(job, context, census, simulation, complete, reuse).data()
    asked = 1 if spec.scale.workers == "auto" else spec.scale.workers
    return {**plan, **fleet_facts(plan["time_s"], workers or asked, price_per_hour)}


def _with_id_errors(job: Job) -> Job:
    """The job with rows of bad ids as errors, where ids are few enough to be looked at."""
    column = job.spec.input.id_column
    if column is None or job.source.num_rows > HASHES_AT_ONCE:
        return job
    return replace(job, source=replace(job.source, bad_ids=find_bad_ids(job.source, column)))


def _lengths(
    spec: JobSpec, context: SimulatedEngine, task: LoadedTask | None, expected: int | None
) -> ExpectedLengths:
    """Expected lengths of a task's samples; ``task`` is None where there are no rows."""
    facts = context.max_model_len, context.eos_token_ids, expected
    if spec.task_spec.draws:
        return ExpectedLengths(*facts)
    if expected is not None:
        raise UsageError(f"--expect-output-tokens: a job with task: {spec.task} writes no tokens")
    return ExpectedLengths(*facts) if task is None else FixedLengths(*facts, task=task)


def _device(name: str) -> Device:
    if name not in DEVICES:
        raise UsageError(f"--device {name}: no such device{did_you_mean(name, tuple(DEVICES))}")
    return DEVICES[name]


def _at_its_time(manifest: Manifest, outputs: Sequence[OutputDir], own: str) -> Manifest:
    """The plan of an update of what is in ``own``, if that is among the outputs: chat templates are
    told the time of the first plan."""
    for out in outputs:
        if str(out.root) == own:
            return replace(manifest, planned_at=plan_of(out).planned_at)
    return manifest


def _ignore(line: str) -> None:
    """A damaged file is told of by whoever would copy from it."""


def _rows(
    job: Job, loaded: LoadedJob, census: Census, reuse: RowReuse | None
) -> Iterator[list[PromptRow]]:
    """The rows to simulate, counted, in the order they would run."""
    window, reader = job.spec.engine.order_window, loaded.reader
    parts = sampled_parts(job.manifest.parts(), window, MAX_ROWS)
    rows = read_prompts(job.source.batches(reader.columns, parts), reader)
    rows = row_keys(job, loaded.context).with_keys(rows)
    if reuse is not None:
        rows = reuse.without_found(rows, lambda found: None)
    windows = plan_windows(
        census.count(rows, MAX_ROWS, MAX_PROMPT_TOKENS),
        parts,
        window,
        by_prefix=job.spec.engine.order == "prefix",
        by_length=job.spec.engine.order == "prefix" and not loaded.context.shares_prefixes,
    )
    for rows_of_window in census.count_distinct(windows):
        for start in range(0, len(rows_of_window), BATCH_ROWS):  # as a job's own loop takes them
            yield rows_of_window[start : start + BATCH_ROWS]
