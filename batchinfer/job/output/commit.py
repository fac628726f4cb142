"""Commits a part: ``stage`` writes it to a staging folder, and ``publish`` moves it into place.

The thread that writes parts stages a part, and reads the staged file back to check it. The holder
of the directory's lock publishes the part: first the statistics and keys of its rows, then its
file, then the record that marks the part as finished.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
import pyarrow as pa

from batchinfer.console.format import first_line
from batchinfer.errors import StorageError
from batchinfer.job.input.parquet import decode_all, open_parquet
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.explode import first_of_rows
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.output.records.part_record import PartRecord
from batchinfer.job.row_ranges import Part
from batchinfer.job.rows.row_key import NO_KEYS
from batchinfer.job.storage.filesystem import publish as publish_file
from batchinfer.job.storage.filesystem import read_file, storage_errors

_PARQUET_ERRORS = (pa.ArrowException, OSError, KeyError)


def check_part(file: pa.NativeFile, part: Part) -> None:
    """Decode a whole part, one batch of a column at a time, and verify its page checksums.

    Args:
        part: the file must hold the part's row ids in order, each once; if exploded, an id may
            repeat consecutively.

    Raises:
        ValueError: the file is damaged or has the wrong rows; the message says what is wrong.
    """
    try:
        decode_all(file)
        _check_row_ids(open_parquet(file).read(["row_id"], use_threads=False), part)
    except _PARQUET_ERRORS as error:
        raise ValueError(first_line(error)) from None


def _check_row_ids(table: pa.Table, part: Part) -> None:
    row_ids = first_of_rows(table.select(["row_id"]))["row_id"].to_numpy()
    if len(row_ids) != part.num_rows:
        raise ValueError(f"it has {len(row_ids):,} rows, not {part.num_rows:,}")
    known = np.concatenate([[part.rows.start - 1], row_ids, [part.rows.stop]])
    if len(row_ids) and not np.all(np.diff(known) > 0):
        raise ValueError("its rows are not the rows of the input in input order")


@dataclass(frozen=True)
class Draft:
    """A part that is staged and checked, but not published."""

    record: PartRecord
    """The part's record, without the modification time and ETags of the published files."""
    staged: PurePath
    staged_requests: PurePath
    staged_keys: PurePath


def stage(
    out: OutputDir,
    part: Part,
    table: pa.Table,
    requests: pa.Table,
    control_text_row_ids: list[int],
    keys: pa.Table = NO_KEYS,
    num_reused: int = 0,
) -> Draft:
    """Write a part, with the statistics and keys of its rows, to the staging folder.

    Args:
        table: the part's rows, in input order.
        requests: the statistics of the rows that ran.
        control_text_row_ids: rows whose input contains the text of a control token of the model,
            such as ``<|im_end|>``.
        keys: row ids and keys of the rows that have a key, with ``KEYS_SCHEMA``.
        num_reused: number of rows copied from another output.

    Raises:
        StorageError: a file cannot be written, or reads back differently.
    """
    staged = out.staging / out.part_file(part).name
    statistics, staged_requests = parquet_bytes([requests]), out.staging / f"requests-{staged.name}"
    key_bytes, staged_keys = parquet_bytes([keys]), out.staging / f"keys-{staged.name}"
    error_codes = _error_codes(first_of_rows(table))
    with storage_errors(out.request_stats(part)):
        out.files.write(staged_requests, statistics)
    with storage_errors(out.row_keys(part)):
        out.files.write(staged_keys, key_bytes)
    with storage_errors(out.part_file(part)):
        out.files.write(staged, parquet_bytes([table]))
        del table  # freed before the file is read back, because a row may take half a gigabyte
        pa.default_memory_pool().release_unused()
        data = read_file(out.files, staged)
    try:
        check_part(pa.BufferReader(data), part)
    except ValueError as error:
        raise StorageError(
            f"{staged} was written, but reading it back failed: {error}",
            hint="check the disk, then run again; finished rows are kept",
        ) from None
    record = PartRecord(
        rows=part.num_rows,
        error_codes=error_codes,
        control_text_row_ids=control_text_row_ids,
        size=len(data),
        mtime_ns=0,
        sha256=hashlib.sha256(data).hexdigest(),
        requests_sha256=hashlib.sha256(statistics).hexdigest(),
        keys_sha256=hashlib.sha256(key_bytes).hexdigest(),
        num_reused=num_reused,
    )
    return Draft(record, staged, staged_requests, staged_keys)


def publish(out: OutputDir, part: Part, draft: Draft) -> PartRecord:
    """Move a staged part into place; when this returns, the part is finished.

    Raises:
        StorageError: a file cannot be written, or its size differs from the staged file's. The part
            is then not finished.
    """
    final, requests = out.part_file(part), out.request_stats(part)
    publish_file(out.files, draft.staged_requests, requests)
    publish_file(out.files, draft.staged_keys, out.row_keys(part))
    publish_file(out.files, draft.staged, final)
    stat, requests_stat = out.files.stat(final), out.files.stat(requests)
    assert stat is not None
    assert requests_stat is not None
    if stat.size != draft.record.size:
        raise StorageError(
            f"{final} has {stat.size:,} bytes, but {draft.record.size:,} bytes were written",
            hint="find out which other program writes to this folder, then run again; "
            "finished rows are kept",
        )
    record = replace(
        draft.record,
        mtime_ns=stat.mtime_ns,
        etag=stat.etag,
        requests_etag=requests_stat.etag,
    )
    out.write(out.record(part), record.to_json())
    return record


def _error_codes(table: pa.Table) -> dict[str, int]:
    errors = table["error"].drop_null().to_pylist() if "error" in table.schema.names else []
    return dict(sorted(Counter(error["code"] for error in errors).items()))
