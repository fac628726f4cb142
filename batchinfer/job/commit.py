"""Committing a part: its rows' statistics, then its file, then the record that says it is whole."""

from __future__ import annotations

import hashlib
from collections import Counter

import pyarrow as pa

from batchinfer.errors import StorageError
from batchinfer.job.explode import first_of_rows
from batchinfer.job.output import OutputDir, parquet_bytes
from batchinfer.job.parquet_check import read_part
from batchinfer.job.part_record import PartRecord
from batchinfer.job.row_ids import Part
from batchinfer.job.storage.filesystem import publish, read_file, storage_errors


def commit(
    out: OutputDir,
    part: Part,
    table: pa.Table,
    requests: pa.Table,
    control_text_row_ids: list[int],
) -> None:
    """Write a finished part; when this returns, it is on disk and counts as finished.

    Args:
        out: where.
        part: which.
        table: its rows, in input order.
        requests: the statistics of those that ran.
        control_text_row_ids: rows whose own text holds what looks like a control token.

    Raises:
        StorageError: the file system refuses, or gives back other bytes than were written; the
            part is then not finished.
    """
    statistics = parquet_bytes([requests])
    out.write(out.request_stats(part), statistics)
    final = out.part_file(part)
    staged = out.staging / final.name
    with storage_errors(final):
        out.files.write(staged, parquet_bytes([table]))
        data = read_file(out.files, staged)
    try:
        read_part(data, part)
    except ValueError as error:
        raise StorageError(
            f"{staged} was written and reads back wrong: {error}",
            hint="check the disk, then run again: finished rows are kept",
        ) from None
    publish(out.files, staged, final)
    stat, requests_stat = out.files.stat(final), out.files.stat(out.request_stats(part))
    assert stat is not None
    assert requests_stat is not None
    record = PartRecord(
        part.num_rows,
        _error_codes(first_of_rows(table)),
        control_text_row_ids,
        stat.size,
        stat.mtime_ns,
        hashlib.sha256(data).hexdigest(),
        hashlib.sha256(statistics).hexdigest(),
        stat.etag,
        requests_stat.etag,
    )
    out.write(out.record(part), record.to_json())


def _error_codes(table: pa.Table) -> dict[str, int]:
    errors = table["error"].drop_null().to_pylist() if "error" in table.schema.names else []
    return dict(sorted(Counter(error["code"] for error in errors).items()))
