"""Finds a few rows and a few failed rows of a job, without reading much of a large job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import PurePath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.console.format import size
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.task import Task
from batchinfer.job.stats.first_errors import named_row, shown_ids
from batchinfer.report.report_data import Example, Failure
from batchinfer.report.stored_stats import UNREADABLE, FinishedRows, batches

MOST_ROWS, MOST_COLUMNS = 4, 4
MOST_CODES, EXAMPLES_PER_CODE = 12, 3
MOST_CHARACTERS = 2000
"""Most characters of a text to read; the page shows less."""
_MOST_BYTES = 1 << 20
"""Most bytes of a value of another type, such as a conversation; larger values are not read."""


def find_examples(
    out: OutputDir, records: Sequence[tuple[Part, PartRecord]], task: Task | None
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
        examples += _first_rows(out, out.part_file(part), task, MOST_ROWS // count)
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


def _first_rows(out: OutputDir, path: PurePath, task: Task, count: int) -> list[Example]:
    try:
        with out.files.open(path) as file:
            schema = pq.read_schema(file)
    except UNREADABLE:
        return []
    # The prompt shows what a row is about, in an input or in a generated column.
    inputs = _columns_to_show(schema, task.spec.columns(("prompt_logprobs",)))
    columns = [*inputs, "row_id", *task.summarised, "num_prompt_tokens", "error"]
    with suppress(*UNREADABLE):
        for batch in batches(out, path, columns, count):
            return [_example(batch.slice(at, 1), inputs, task) for at in range(len(batch))]
    return []


def _columns_to_show(schema: pa.Schema, generated: Collection[str]) -> list[str]:
    """Choose kept columns to show. Texts and conversations come first, because they say most."""
    kept = [field for field in schema if field.name not in generated]
    kept.sort(key=lambda field: not (_is_text(field.type) or pa.types.is_nested(field.type)))
    shown = {field.name for field in kept[:MOST_COLUMNS]}
    return [field.name for field in schema if field.name in shown]


def _example(row: pa.RecordBatch, inputs: Sequence[str], task: Task) -> Example:
    error = row.column("error")[0]
    values = {
        name: _cut(row.column(name))[0].as_py() for name in row.schema.names if name not in inputs
    }
    answer, facts = task.summarise(values)
    return Example(
        row_id=row.column("row_id")[0].as_py(),
        inputs=[(name, _input_text(row.column(name))) for name in inputs],
        answer=answer and answer[:MOST_CHARACTERS],
        facts=facts,
        error=(_text(error["code"]), _text(error["message"])) if error.is_valid else None,
    )


def _input_text(value: pa.Array) -> str:
    """Return the text of one row's value, without reading a value of half a gigabyte."""
    if pa.types.is_dictionary(value.type):
        value = value.dictionary_decode()
    if not _is_text(value.type) and value.nbytes > _MOST_BYTES:
        return f"({size(value.nbytes)})"
    return _text(_cut(value)[0])


def _cut(values: pa.Array) -> pa.Array:
    return pc.utf8_slice_codeunits(values, 0, MOST_CHARACTERS) if _is_text(values.type) else values


def _text(value: Any) -> str:
    plain = value.as_py()
    return "" if plain is None else str(plain)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
