"""A few rows of a job, and a few that failed, with little reading whatever the job's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.task import Task
from batchinfer.job.stats.first_errors import named_row, shown_id
from batchinfer.report.report_data import Example, Failure
from batchinfer.report.stored_stats import UNREADABLE, FinishedRows, batches

MOST_ROWS, MOST_COLUMNS = 4, 4
MOST_CODES, OF_EACH_CODE = 12, 3
MOST_CHARACTERS = 2000
"""Longest text that is handed on; a page shows less."""


def find_examples(
    out: OutputDir, records: Sequence[tuple[Part, PartRecord]], task: Task | None
) -> list[Example]:
    """Rows from the beginning of a few finished parts, spread over the job.

    Args:
        task: the job's; None: one that this version does not know.
    """
    if not records or task is None:
        return []
    count = min(MOST_ROWS, len(records))
    parts = [records[at * len(records) // count][0] for at in range(count)]
    of_each = MOST_ROWS // count
    found: list[Example] = []
    for part in parts:
        found += _first_rows(out, out.part_file(part), task, of_each)
    return found[:MOST_ROWS]


def find_failures(
    out: OutputDir,
    records: Sequence[tuple[Part, PartRecord]],
    segments: Sequence[PurePath],
    done: FinishedRows,
    ids: str | None,
) -> list[Failure]:
    """Rows that failed, by code, with examples; reads only parts that have more of them.

    Args:
        ids: the output column of ids; None: there is none.
    """
    counts: Counter[str] = Counter()
    for _, record in records:
        counts.update(record.error_codes)
    examples: dict[str, list[tuple[str, str]]] = {}
    for path in segments:
        for row, code, message in _errors(out, path, done, ids):
            counts[code] += 1
            _keep(examples, row, code, message)
    most = [code for code, _ in counts.most_common(MOST_CODES)]
    for part, record in records:
        missing = {c for c in record.error_codes if len(examples.get(c, ())) < OF_EACH_CODE}
        if missing.isdisjoint(most):
            continue
        for row, code, message in _errors(out, out.part_file(part), FinishedRows([]), ids):
            _keep(examples, row, code, message)
    return [Failure(code, rows, examples.get(code, [])) for code, rows in counts.most_common()]


def _keep(examples: dict[str, list[tuple[str, str]]], row: str, code: str, message: str) -> None:
    some = examples.setdefault(code, [])
    if len(some) < OF_EACH_CODE:
        some.append((row, message))


def _errors(
    out: OutputDir, path: PurePath, but: FinishedRows, ids: str | None
) -> Iterator[tuple[str, str, str]]:
    """Rows by their names, codes and messages."""
    for batch in batches(out, path, ["row_id", "error", *([] if ids is None else [ids])]):
        rows = but.left_out(batch)
        failed = rows.filter(rows.column("error").is_valid())
        codes, messages = (failed.column("error").field(name) for name in ("code", "message"))
        names = failed.column(ids).to_pylist() if ids in failed.schema.names else repeat(None)
        for row_id, known_as, code, message in zip(
            failed.column("row_id").to_pylist(), names, codes, messages, strict=False
        ):
            yield named_row(row_id, shown_id(known_as)), _text(code), _text(message)


def _first_rows(out: OutputDir, path: PurePath, task: Task, count: int) -> list[Example]:
    try:
        with out.files.open(path) as file:
            schema = pq.read_schema(file)
    except UNREADABLE:
        return []
    # A prompt is what a row is about, be it kept or generated.
    inputs = _columns_to_show(schema, task.spec.columns(("prompt_logprobs",)))
    columns = [*inputs, "row_id", *task.summarised, "num_prompt_tokens", "error"]
    rows: list[Example] = []
    for batch in batches(out, path, columns, count):
        with suppress(*UNREADABLE):
            rows = [_example(batch.slice(at, 1), inputs, task) for at in range(len(batch))]
        break
    return rows


def _columns_to_show(schema: pa.Schema, generated: Collection[str]) -> list[str]:
    """Kept columns: texts and conversations first, they are what a row is about."""
    kept = [field for field in schema if field.name not in generated]
    kept.sort(key=lambda field: not (_is_text(field.type) or pa.types.is_nested(field.type)))
    shown = {field.name for field in kept[:MOST_COLUMNS]}
    return [field.name for field in schema if field.name in shown]


def _example(row: pa.RecordBatch, inputs: Sequence[str], task: Task) -> Example:
    error = row.column("error")[0]
    own = set(row.schema.names).difference(inputs)
    values = {name: _cut(row.column(name))[0].as_py() for name in own}
    answer, facts = task.summarise(values)
    return Example(
        row_id=row.column("row_id")[0].as_py(),
        inputs=[(name, _text(_cut(row.column(name))[0])) for name in inputs],
        answer=answer and answer[:MOST_CHARACTERS],
        facts=facts,
        error=(_text(error["code"]), _text(error["message"])) if error.is_valid else None,
    )


def _cut(values: pa.Array) -> pa.Array:
    """Texts, their beginnings: a row may hold half a gigabyte."""
    return pc.utf8_slice_codeunits(values, 0, MOST_CHARACTERS) if _is_text(values.type) else values


def _text(value: Any) -> str:
    found = value.as_py()
    return found if isinstance(found, str) else "" if found is None else str(found)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
