"""Implements ``batchinfer plan``: forecasts a job's time, memory and cost without running it.

The plan reads the data, the tokenizer and the model's config, and passes the rows to the scheduler
of a real run, but with a runner that computes nothing. A roofline model estimates the time of each
step (``batchinfer.engine.simulate.roofline`` lists what the model leaves out). The plan has the
same blocks, rows in flight, sharing, waste and preemptions as the run if the assumed output lengths
are right: every sample runs to ``max_tokens``, or to ``--expect-output-tokens``.

To bound its time, the plan checks ids only in datasets of up to ``unique_ids.HASHES_AT_ONCE`` rows,
reads about ``row_counts.MAX_ROWS`` rows and ``MAX_PROMPT_TOKENS`` prompt tokens at most, and
simulates at most ``simulation.MAX_STEPS`` steps and ``MAX_OUTPUT_TOKENS`` output tokens. The counts
are then scaled to the whole dataset; ``sampled`` in the result says how many rows were read and how
much was simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchinfer.console.format import did_you_mean
from batchinfer.engine.simulate.roofline import DEVICES, Device
from batchinfer.errors import RowError, UsageError
from batchinfer.job.images.job_images import may_have_images
from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.input.unique_ids import HASHES_AT_ONCE, find_bad_ids
from batchinfer.job.job import Job, LoadedJob, load, open_input, open_job, row_keys
from batchinfer.job.model_files.facts import model_facts
from batchinfer.job.output.resume import plan_of
from batchinfer.job.plan.plan_summary import PlanSummary
from batchinfer.job.plan.row_counts import MAX_PROMPT_TOKENS, MAX_ROWS, RowCounts, sampled_parts
from batchinfer.job.plan.simulation import ExpectedLengths, Simulation
from batchinfer.job.reuse.reuse import RowReuse, open_outputs
from batchinfer.job.rows.read_prompts import read_prompts
from batchinfer.job.rows.row_order import plan_windows
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.spec.spec import JobSpec
from batchinfer.requests.requests import PromptRow

if TYPE_CHECKING:
    from batchinfer.builders.simulated_engine import SimulatedEngine


_PARTS_EACH = 6
"""Minimum number of parts per worker, so that no worker waits long for other workers at the end."""


def plan_job(
    spec: JobSpec,
    *,
    device: str | None = None,
    expect_output_tokens: int | None = None,
    workers: int | None = None,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """Forecast what a run of the whole job needs, without writing anything; return JSON data.

    With ``output.reuse``, this function hashes the model's files to find rows that the same model
    computed.

    Args:
        device: a name from ``DEVICES``; None for the device that ``engine.device`` selects on this
            machine.
        expect_output_tokens: tokens per sample; None to assume ``max_tokens``, an upper bound.
        workers: number of devices that share the job; None for ``scale.workers``, or 1 for
            ``auto``.
        price_per_hour: price of one device per hour; None to leave out the cost.

    Raises:
        JobError: a run would fail. Damaged weights and a missing device are not detected.
        UsageError: ``device`` is unknown, or ``expect_output_tokens`` is given although the task
            writes no tokens.
    """
    chosen = None if device is None else _device(device)
    outputs = open_outputs(spec.output.reuse, own=None)
    if spec.accept is not None:  # assume the largest number of tries: an upper bound
        most = replace(spec.sampling, n=spec.accept.max_tries)
        spec = spec.model_copy(update={"sampling": most})
        outputs = []  # no row of an earlier output would match, because n changes the row keys
    job = open_job(spec, open_input(spec), facts_of=model_facts if outputs else None)
    column = spec.input.id_column
    if column is not None and job.source.num_rows <= HASHES_AT_ONCE:
        bad_ids = find_bad_ids(job.source, column)
        job = replace(job, source=replace(job.source, bad_ids=bad_ids))
    for out in outputs:
        if str(out.root) == spec.output.path:
            # In an update, chat templates see the time of the first plan.
            planned_at = plan_of(out).planned_at
            job = replace(job, manifest=replace(job.manifest, planned_at=planned_at))
    reuse = RowReuse(outputs, job.table.generated_schema, _ignore) if outputs else None
    # Import late, because this imports torch, which is slow.
    from batchinfer.builders.simulated_engine import build_dry_engine, device_of

    context = build_dry_engine(
        spec.model.config(TASKS[spec.task].runner(spec)),
        spec.engine,
        chosen or device_of(spec.engine),
        end_after=expect_output_tokens,
        with_images=may_have_images(spec, job.source),
    )
    loaded = load(job, lambda *_, **__: context)
    with nullcontext() if loaded is None else closing(loaded):
        task = None if loaded is None else loaded.task
        lengths = _lengths(spec, context, task, expect_output_tokens)
        counts = RowCounts(lengths, 0 if task is None else task.result_bytes)
        most_waiting = 2 * spec.engine.max_num_seqs
        simulation = Simulation(
            context.engine, context.runner, context.block_size, lengths, most_waiting
        )
        batches: Iterator[list[PromptRow]] = iter(())
        if loaded is not None:
            batches = _rows(job, loaded, counts, reuse)
        complete = simulation.run(batches)
        for _ in batches:  # count the rows that the simulation did not reach
            pass
    patches = _patches_per_token(loaded)
    plan = PlanSummary(job, context, counts, simulation, complete, reuse, patches).data()
    workers = workers or (1 if spec.scale.workers == "auto" else spec.scale.workers)
    cost = None if price_per_hour is None else plan["time_s"] / 3600 * price_per_hour
    # Each worker writes whole parts. Workers with several parts each end at about the same time.
    most_rows = max(1, plan["rows"] // (_PARTS_EACH * workers))
    has_few_parts = workers > 1 and spec.output.rows_per_part > most_rows
    return {
        **plan,
        "workers": workers,
        "wall_s": plan["time_s"] / workers,
        "max_rows_per_part": most_rows if has_few_parts else None,
        "cost": cost,
    }


def _patches_per_token(loaded: LoadedJob | None) -> float:
    """Return how many patches the vision tower reads per image token; 0 without images."""
    if loaded is None or loaded.images is None or loaded.context.images is None:
        return 0.0
    size = loaded.context.images.patch_size
    try:
        return 1.0 if size is None else loaded.images.settings.processor().patches_per_token(size)
    except RowError:  # with do_resize: false, the processor may refuse the trial image
        return 1.0


def _lengths(
    spec: JobSpec, context: SimulatedEngine, task: LoadedTask | None, expected: int | None
) -> ExpectedLengths:
    facts = context.max_model_len, context.eos_token_ids, expected
    if spec.task_spec.draws:
        return ExpectedLengths(*facts)
    if expected is not None:
        raise UsageError(
            f"--expect-output-tokens: a job with task: {spec.task} writes no tokens; leave it out"
        )
    return ExpectedLengths(*facts, task=task)


def _device(name: str) -> Device:
    if name not in DEVICES:
        raise UsageError(f"--device {name}: no such device{did_you_mean(name, tuple(DEVICES))}")
    return DEVICES[name]


def _ignore(line: str) -> None:
    """Drop a warning about a damaged file; the run will give this warning."""


def _rows(
    job: Job, loaded: LoadedJob, counts: RowCounts, reuse: RowReuse | None
) -> Iterator[list[PromptRow]]:
    """Yield the rows to simulate in the order of a run, and count them."""
    window, reader = job.spec.engine.order_window, loaded.reader
    parts = sampled_parts(job.manifest.parts(), window, MAX_ROWS)
    rows = read_prompts(job.source.batches(reader.columns, parts), reader)
    rows = row_keys(job, loaded.context).with_keys(rows)
    if reuse is not None:
        rows = reuse.without_found(rows, lambda found: None)
    windows = plan_windows(
        counts.count(rows, MAX_ROWS, MAX_PROMPT_TOKENS),
        parts,
        window,
        by_prefix=job.spec.engine.order == "prefix",
        by_length=job.spec.engine.order == "prefix" and not loaded.context.shares_prefixes,
        with_branch_points=loaded.context.slots_per_state > 0,
    )
    for rows_of_window in counts.count_distinct(windows):
        for start in range(0, len(rows_of_window), BATCH_ROWS):  # in batches as large as a run's
            yield rows_of_window[start : start + BATCH_ROWS]
