"""The commit of a part: its rows' statistics, then its file, then the record that says it is whole.

A part is read back before it appears, to see whether its bytes are what they must be.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import first_line
from batchinfer.errors import StorageError
from batchinfer.job.output.directory import OutputDir, parquet_bytes
from batchinfer.job.output.explode import first_of_rows
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.row_ids import Part
from batchinfer.job.storage.filesystem import publish, read_file, storage_errors


def read_part(data: bytes, part: Part) -> pa.Table:
    """Decode all of a part, page checksums verified.

    Args:
        data: the Parquet file.
        part: its row ids must be there in order; where it is exploded, each once or more.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        table = file.read(use_threads=False)
        found = first_of_rows(table.select(["row_id"]))["row_id"].to_numpy()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(first_line(error)) from None
    if len(found) != part.num_rows:
        raise ValueError(f"it has {len(found):,} rows, not {part.num_rows:,}")
    known = np.concatenate([[part.rows.start - 1], found, [part.rows.stop]])
    if len(found) and not np.all(np.diff(known) > 0):
        raise ValueError("its rows are not the input's, in input order")
    return table


def commit(
    out: OutputDir,
    part: Part,
    table: pa.Table,
    requests: pa.Table,
    control_text_row_ids: list[int],
) -> None:
    """Write a finished part; when this returns, it is on disk and counts as finished.

    Args:
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
    error_codes = _error_codes(first_of_rows(table))
    with storage_errors(final):
        out.files.write(staged, parquet_bytes([table]))
        del table  # before it is read back: a row may be half a gigabyte
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
        error_codes,
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
