"""Reads the data of a report from an output directory; the job may still run.

This module reads the statistics of all rows, but only a few examples and failed rows themselves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.console.format import size
from batchinfer.errors import DataError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.output.resume import plan_of
from batchinfer.job.row_ranges import Part
from batchinfer.job.rows.task import Task
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.stats.first_errors import id_column, named_row, shown_ids
from batchinfer.job.stats.run_record import Run, engine_wall_s, package_versions, runs_of, wall_s
from batchinfer.job.stats.status import Status, read_status
from batchinfer.job.stats.summary import phase_seconds
from batchinfer.report.lanes import lanes_of
from batchinfer.report.report_data import Example, Failure, ReportData, RunFacts
from batchinfer.report.sanitize import without_secrets
from batchinfer.report.stored_stats import (
    UNREADABLE,
    FinishedRows,
    batches,
    read_lengths,
    read_timeline,
)
from batchinfer.report.thumbnails import Pictures
from batchinfer.report.units import moment

_MOST_FILES = 12
_MAX_ERROR_RATE = 0.01  # used if no run has recorded its job

MOST_ROWS, MOST_COLUMNS = 4, 4
MOST_CODES, EXAMPLES_PER_CODE = 12, 3
MOST_CHARACTERS = 2000
"""Maximum number of characters of a text to read; the page shows fewer."""
_MOST_BYTES = 32 << 20
"""Maximum size in bytes of a value that is not text, such as a conversation with images; larger
values are not read."""
_MOST_SHOWN = 1 << 20
"""Maximum number of characters of a value that is not text, without its images. For larger values,
the page shows only the size."""


def from_output(out: OutputDir, now: float) -> ReportData:
    """Return the data of a report on the job in ``out``, reading rows a batch at a time.

    Args:
        now: seconds since 1970.

    Raises:
        DataError: ``out`` holds no job's output, or its plan is damaged.
    """
    plan = plan_of(out)
    status = read_status(out, now)
    # List segments before parts, so that rows moved from a segment to a part are not missed.
    segments = out.files.entries(out.segments)
    records = list(_records(out, plan))
    done = FinishedRows([part.rows for part, _ in records])
    runs = list(runs_of(out))
    latest = ([run for run in runs if run.kv] or runs or [Run("", {})])[-1]
    job = latest.job or plan.job
    sampling = job.get("sampling") or {}
    merged = len(records) == len(plan.parts()) and out.files.stat(out.summary) is not None
    steps, requests = [out.stats / "steps.parquet"], [out.stats / "requests.parquet"]
    if not merged:
        steps = list(out.files.entries(out.steps))
        requests = [out.request_stats(part) for part, _ in records]
    timeline = read_timeline(out, steps, runs, merged)
    max_error_rate = (job.get("errors") or {}).get("max_error_rate", _MAX_ERROR_RATE)
    running = {worker.worker for worker in status.workers if worker.state == "running"}
    task = TASKS.get(plan.job.get("task", "generate"))
    return ReportData(
        title=without_secrets(str(job.get("name") or out.root.name)),
        state=_state(status, max_error_rate, merged),
        when=", ".join(filter(None, [moment(runs[-1].saved_at if runs else 0.0), _update(status)])),
        model=without_secrets(str(latest.model.get("name", ""))),
        device=_device(latest),
        rows_total=status.rows_total,
        rows_done=status.rows_done,
        rows_failed=status.rows_error,
        total_s=sum(run.total_s for run in runs),
        load_s=sum(run.load_s for run in runs),
        engine_s=engine_wall_s(runs),
        wall_s=wall_s(runs),
        timeline=timeline,
        lengths=read_lengths(out, requests, segments, done),
        kv=latest.kv,
        unit="sequence" if (sampling.get("n") or 1) > 1 or sampling.get("beam_width") else "row",
        draws=task is None or task.spec.draws,
        phases=phase_seconds(runs),
        rows_reused=sum(record.num_reused for _, record in records),
        replaced_cells=plan.replaced_cells,
        max_error_rate=max_error_rate,
        share=status.share,
        eta_s=status.eta_s,
        eta_is_most=status.eta_is_most,
        phase=status.phase or "",
        error=without_secrets(status.error or ""),
        out_of_memory=sum(run.out_of_memory for run in runs),
        failures=find_failures(out, records, segments, done, id_column(plan)),
        examples=find_examples(out, records, task, Pictures(job, plan.inputs[0].path)),
        runs=[_facts(run) for run in runs],
        lanes=lanes_of(runs, timeline, set() if merged else running),
        job=_sections(job, plan),
        versions=package_versions(),
    )


def _records(out: OutputDir, plan: Manifest) -> Iterator[tuple[Part, PartRecord]]:
    for part in plan.parts():
        with suppress(DataError):
            record = out.read_record(part)
            if record is not None:
                yield part, record


def _state(status: Status, max_error_rate: float, merged: bool) -> str:
    """Return the job's state. A run writes its report at its end, before it writes ``_SUCCESS``."""
    if merged or status.state == "finished_with_errors":
        too_many = status.rows_error > max_error_rate * status.rows_total
        return "finished with too many errors" if too_many else "finished"
    return status.state


def _update(status: Status) -> str:
    line = None if status.update is None else status.update.line
    return "" if line is None else f"{line.label}: {line.value}{line.note}"


def _facts(run: Run) -> RunFacts:
    end = "failed" if run.error else "ended" if run.ended else "not ended"
    times = (run.load_s, run.total_s, run.saved_at)
    return RunFacts(run.run_id, _device(run), run.rows, *times, end)


def _device(run: Run) -> str:
    """Return a run's device, and each kernel library with the layers that it computed."""
    computed: dict[str, list[str]] = {}
    for what, name in run.kernels.items():
        computed.setdefault(name, []).append(what)
    used = [f"{name} ({', '.join(what)})" for name, what in computed.items()]
    return ", ".join(filter(None, [run.device, *used]))


def _sections(job: Mapping[str, Any], plan: Manifest) -> dict[str, dict[str, Any]]:
    """Return the sections of the job; keys outside a section come first."""
    plain = {key: value for key, value in job.items() if not isinstance(value, dict) or not value}
    sections = {key: value for key, value in job.items() if key not in plain}
    files = {file.path: f"{file.num_rows:,} rows" for file in plan.inputs[:_MOST_FILES]}
    if len(plan.inputs) > _MOST_FILES:
        files["and"] = f"{len(plan.inputs) - _MOST_FILES:,} more files"
    sections.pop("model_facts", None)  # contains only hashes
    shown: dict[str, dict[str, Any]] = without_secrets(
        {"job": plain, **sections, "input files": files}
    )
    return shown


def find_examples(
    out: OutputDir,
    records: Sequence[tuple[Part, PartRecord]],
    task: Task | None,
    pictures: Pictures,
) -> list[Example]:
    """Return rows from the beginning of a few finished parts, spread over the job.

    Args:
        task: the job's task; None if this version does not know the task.
    """
    if not records or task is None:
        return []
    count = min(MOST_ROWS, len(records))
    examples: list[Example] = []
    for at in range(count):
        part, _ = records[at * len(records) // count]
        path, rows = out.part_file(part), MOST_ROWS // count
        examples += _first_rows(out, path, task, rows, pictures)
    return examples


def find_failures(
    out: OutputDir,
    records: Sequence[tuple[Part, PartRecord]],
    segments: Sequence[PurePath],
    done: FinishedRows,
    ids: str | None,
) -> list[Failure]:
    """Return failed rows by code, with examples; read a part only if it may add an example.

    Args:
        ids: output column of ids; None if the output has no ids.
    """
    examples: dict[str, list[tuple[str, str]]] = defaultdict(list)

    def collect(path: PurePath, done: FinishedRows) -> Iterator[str]:
        for row, code, message in _errors(out, path, done, ids):
            if len(examples[code]) < EXAMPLES_PER_CODE:
                examples[code].append((row, message))
            yield code

    counts: Counter[str] = Counter()
    for _, record in records:
        counts.update(record.error_codes)
    for path in segments:
        counts.update(collect(path, done))
    shown = {code for code, _ in counts.most_common(MOST_CODES)}
    for part, record in records:
        if any(len(examples[code]) < EXAMPLES_PER_CODE for code in shown & {*record.error_codes}):
            list(collect(out.part_file(part), FinishedRows([])))
    return [Failure(code, rows, examples[code]) for code, rows in counts.most_common()]


def _errors(
    out: OutputDir, path: PurePath, done: FinishedRows, ids: str | None
) -> Iterator[tuple[str, str, str]]:
    """Yield names, codes and messages of failed rows that are not in ``done``."""
    for batch in batches(out, path, ["row_id", "error", *([] if ids is None else [ids])]):
        rows = done.removed_from(batch)
        failed = rows.filter(rows.column("error").is_valid())
        codes, messages = (failed.column("error").field(name) for name in ("code", "message"))
        names = shown_ids(failed.column(ids)) if ids in failed.schema.names else repeat(None)
        for row_id, name, code, message in zip(
            failed.column("row_id").to_pylist(), names, codes, messages, strict=False
        ):
            yield named_row(row_id, name), _text(code), _text(message)


def _first_rows(
    out: OutputDir, path: PurePath, task: Task, count: int, pictures: Pictures
) -> list[Example]:
    try:
        with out.files.open(path) as file:
            schema = pq.read_schema(file)
    except UNREADABLE:
        return []
    # Show the generated column ``prompt`` like an input, because it says what a row is about.
    generated = task.spec.columns(("prompt_logprobs",))
    inputs = _columns_to_show(schema, {*generated, *pictures.columns})
    columns = [*inputs, "row_id", *task.summarized, "num_prompt_tokens", "error"]
    columns += [name for name in pictures.read_columns(schema) if name not in columns]
    with suppress(*UNREADABLE):
        for batch in batches(out, path, columns, count):
            rows = (batch.slice(at, 1) for at in range(len(batch)))
            return [_example(row, inputs, task, pictures) for row in rows]
    return []


def _columns_to_show(schema: pa.Schema, generated: Collection[str]) -> list[str]:
    """Choose input columns to show; prefer texts and conversations, which say most about a row."""
    kept = [field for field in schema if field.name not in generated]
    kept.sort(key=lambda field: not (_is_text(field.type) or pa.types.is_nested(field.type)))
    shown = {field.name for field in kept[:MOST_COLUMNS]}
    return [field.name for field in schema if field.name in shown]


def _example(row: pa.RecordBatch, inputs: Sequence[str], task: Task, pictures: Pictures) -> Example:
    error = row.column("error")[0]
    read_by_others = {*inputs, *pictures.read_columns(row.schema)}
    others = (name for name in row.schema.names if name not in read_by_others)
    values = {name: _cut(row.column(name))[0].as_py() for name in others}
    answer, facts = task.summarize(values)
    return Example(
        row_id=row.column("row_id")[0].as_py(),
        inputs=[(name, _input_text(row.column(name))) for name in inputs],
        answer=answer and answer[:MOST_CHARACTERS],
        facts=facts,
        error=(_text(error["code"]), _text(error["message"])) if error.is_valid else None,
        # If the row has no error, the job could decode its images, so the report can too.
        pictures=() if error.is_valid else pictures.of(row),
    )


def _input_text(value: pa.Array) -> str:
    """Return one row's value as text, or only its size if it is large and not text."""
    if pa.types.is_dictionary(value.type):
        value = value.dictionary_decode()
    if _is_text(value.type):
        return _text(_cut(value)[0])
    if value.nbytes > _MOST_BYTES:
        return f"({size(value.nbytes)})"
    plain = value[0].as_py()
    text = "" if plain is None else str(_without_images(plain))
    return text[:MOST_CHARACTERS] if len(text) <= _MOST_SHOWN else f"({size(value.nbytes)})"


def _without_images(value: Any) -> Any:
    """Replace bytes and data URLs in a value by their sizes."""
    if isinstance(value, Mapping):
        return {name: _without_images(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_images(item) for item in value]
    is_image = isinstance(value, bytes) or (isinstance(value, str) and value[:5] == "data:")
    return f"({size(len(value))})" if is_image else value


def _cut(values: pa.Array) -> pa.Array:
    return pc.utf8_slice_codeunits(values, 0, MOST_CHARACTERS) if _is_text(values.type) else values


def _text(value: Any) -> str:
    plain = value.as_py()
    return "" if plain is None else str(plain)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
