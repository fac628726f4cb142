"""Finds the first failed rows of a job, for summaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import counted, printable
from batchinfer.console.table import SummaryLine
from batchinfer.job.input.invalid_utf8 import python_values
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.row_ranges import Part

MOST = 5
_MOST_CHARACTERS = 40


def first_errors(
    out: OutputDir, manifest: Manifest, records: Iterable[PartRecord | None]
) -> list[dict[str, Any]]:
    """Return ``row_id``, ``id`` (None without an id column) and ``code`` of the first failed rows.

    Args:
        records: records of the job's parts in order; None for an unfinished part.
    """
    column = id_column(manifest)
    failed: dict[int, dict[str, Any]] = {}
    for part, record in zip(manifest.parts(), records, strict=False):
        if record is None or not record.error_codes:
            continue
        for row in _failed(out, part, column):
            failed.setdefault(row["row_id"], row)
            if len(failed) == MOST:
                return list(failed.values())
    return list(failed.values())


def error_lines(
    codes: Mapping[str, int], errors: Iterable[Mapping[str, Any]]
) -> Iterator[SummaryLine]:
    """Yield a line for each of the ``MOST`` most frequent error codes, and one for all other codes.

    A line has the number of rows with the code, and the first of these rows.

    Args:
        codes: number of rows, keyed by code, most frequent first.
        errors: result of ``first_errors``.
    """
    rows: dict[str, list[str]] = {}
    for error in errors:
        rows.setdefault(error["code"], []).append(named_row(error["row_id"], error["id"]))
    for code, count in list(codes.items())[:MOST]:
        named = rows.get(code, [])
        more = [f"and {count - len(named):,} more"] if 0 < len(named) < count else []
        note = f": {', '.join([*named, *more])}" if named else ""
        yield SummaryLine("errors", f"{code} {count:,}", note, tone="bad")
    rest = list(codes.values())[MOST:]
    if rest:
        yield SummaryLine(
            "errors", f"{sum(rest):,} of {counted(len(rest), 'other code')}", tone="bad"
        )


def named_row(row_id: int, known_as: str | None) -> str:
    """Name a row by its row id, and also by its value in the id column if it has one."""
    return f"row {row_id}" if known_as is None else f"row {row_id} ({known_as})"


def shown_ids(column: pa.Array) -> list[str | None]:
    """Return ids as text for messages. Times that Python cannot represent become numbers."""
    try:
        values = column.to_pylist()
    except (OverflowError, ValueError):
        values = python_values(column)
    return [None if value is None else printable(str(value), _MOST_CHARACTERS) for value in values]


def id_column(manifest: Manifest) -> str | None:
    column = manifest.job.get("input", {}).get("id_column")
    if manifest.job.get("input", {}).get("format") == "openai-batch":
        column = "custom_id"
    renamed: str | None = manifest.job.get("output", {}).get("rename", {}).get(column, column)
    return renamed


def _failed(out: OutputDir, part: Part, column: str | None) -> Iterator[dict[str, Any]]:
    columns = ["row_id", "error.code", *([] if column is None else [column])]
    with suppress(OSError, pa.ArrowException), out.files.open(out.part_file(part)) as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=columns):
            failed = batch.filter(batch.column("error").is_valid()).slice(0, MOST)
            ids = repeat(None) if column is None else shown_ids(failed.column(column))
            rows = failed.select(["row_id", "error"]).to_pylist()
            for row, known_as in zip(rows, ids, strict=False):
                yield {"row_id": row["row_id"], "id": known_as, "code": row["error"]["code"]}
