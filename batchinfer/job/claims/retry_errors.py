"""Implements ``--retry-errors``, which reruns only the rows that ended in an error.

This module moves the good rows of each finished part with failed rows back to a segment, then
deletes the part's record. A part without a record counts as unfinished.
"""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.errors import DataError
from batchinfer.job.claims.crashed_rows import forget_given_up
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir, Trust
from batchinfer.job.output.explode import whole_rows
from batchinfer.job.output.finished_row_segments import (
    CONTROL_TEXT_COLUMN,
    REQUEST_COLUMN,
    Segments,
)
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.output.stats_tables import REQUEST
from batchinfer.job.row_ranges import Part
from batchinfer.job.rows.row_key import KEY_COLUMN, KEY_TYPE
from batchinfer.job.storage.filesystem import storage_errors


def has_errors(out: OutputDir, plan: Manifest) -> bool:
    """Return True if a row of a finished part ended in an error."""
    return bool(_parts_with_errors(out, plan, "times"))


def reopen(out: OutputDir, plan: Manifest, generated: pa.Schema) -> None:
    """Reopen finished parts so that failed rows run again. The caller holds the directory's lock.

    Raises:
        DataError: a part cannot be read.
        StorageError: the directory cannot be written to.
    """
    segments = Segments(out, plan, plan.parts(), generated)
    segments.recover()
    segments.forget_errors()
    forget_given_up(out)
    reopened = _parts_with_errors(out, plan, "marks")
    if not reopened:
        return
    out.reopen()
    for part, record in reopened:
        table = _good_rows(out, part, record, segments.schema)
        if table.num_rows:
            segments.add(table)
        with storage_errors(out.parts, "delete"):
            out.files.delete(out.record(part))
            # Without this sync, a crash could bring back the old record next to the new part.
            out.files.sync(out.parts)


def _parts_with_errors(
    out: OutputDir, plan: Manifest, trust: Trust
) -> list[tuple[Part, PartRecord]]:
    failed = []
    for part in plan.parts():
        with suppress(DataError):  # damaged parts are written again in any case
            record = out.finished(part, trust)
            if record is not None and record.error_codes:
                failed.append((part, record))
    return failed


def _good_rows(out: OutputDir, part: Part, record: PartRecord, schema: pa.Schema) -> pa.Table:
    """Return a finished part's successful rows, as a table with a segment's schema."""
    table = whole_rows(out.read_part(part))
    row_ids = table["row_id"]
    control = pc.is_in(row_ids, pa.array(record.control_text_row_ids, pa.int64()))
    keys = out.read_keys(part, record)
    added = {
        REQUEST_COLUMN: _requests(out, part, row_ids),
        CONTROL_TEXT_COLUMN: control,
        KEY_COLUMN: pa.nulls(len(row_ids), KEY_TYPE),
    }
    if keys is not None:
        at = pc.index_in(row_ids, keys["row_id"].combine_chunks())
        added[KEY_COLUMN] = keys[KEY_COLUMN].take(at)
    columns = [table[name] if name not in added else added[name] for name in schema.names]
    rows = pa.table(columns, schema=schema)
    return rows.filter(pc.equal(rows["status"], "ok"))


def _requests(out: OutputDir, part: Part, row_ids: pa.ChunkedArray) -> pa.Array:
    statistics: dict[int, dict[str, float]] = {}
    with suppress(OSError, pa.ArrowException, KeyError):
        for row in out.read_table(out.request_stats(part)).to_pylist():
            statistics[row.pop("row_id")] = row
    return pa.array([statistics.get(row_id) for row_id in row_ids.to_pylist()], REQUEST)
