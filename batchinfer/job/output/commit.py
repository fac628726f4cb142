"""The commit of a part, in two halves: ``stage`` writes it aside, ``publish`` puts it in its place.

Whoever makes a part stages it and reads it back, to see whether its bytes are what they must be.
Whoever may write to the output publishes it: its rows' statistics, then its file, then the record
that says it is whole. A ``Draft`` goes from one to the other, in one process or between two: then
``hand_over`` gives what is staged a name that nobody writes to again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
import pyarrow as pa

from batchinfer.console.format import first_line
from batchinfer.errors import StorageError
from batchinfer.job.input.parquet_batches import decode_all, open_parquet
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.explode import first_of_rows
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.row_key import NO_KEYS
from batchinfer.job.storage.filesystem import publish as publish_file
from batchinfer.job.storage.filesystem import read_file, storage_errors

_PARQUET_ERRORS = (pa.ArrowException, OSError, KeyError)


def check_part(file: pa.NativeFile, part: Part) -> None:
    """Decode all of a part, page checksums verified, with no more than a batch of a column at a
    time in memory.

    Args:
        file: Parquet.
        part: its row ids must be there in order; where it is exploded, each once or more.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        decode_all(file)
        _check_row_ids(open_parquet(file).read(["row_id"], use_threads=False), part)
    except _PARQUET_ERRORS as error:
        raise ValueError(first_line(error)) from None


def _check_row_ids(table: pa.Table, part: Part) -> None:
    found = first_of_rows(table.select(["row_id"]))["row_id"].to_numpy()
    if len(found) != part.num_rows:
        raise ValueError(f"it has {len(found):,} rows, not {part.num_rows:,}")
    known = np.concatenate([[part.rows.start - 1], found, [part.rows.stop]])
    if len(found) and not np.all(np.diff(known) > 0):
        raise ValueError("its rows are not the input's, in input order")


@dataclass(frozen=True)
class Draft:
    """A part that is staged and found whole, and that nobody sees yet: plain values, fit for JSON.

    Paths are below ``OutputDir.state``.
    """

    part: int
    """Its index."""
    num_rows: int
    error_codes: dict[str, int]
    """Rows that failed, by code."""
    control_text_row_ids: list[int]
    """Rows whose own text holds what looks like one of the model's control tokens."""
    staged: str
    size: int
    """Bytes of the staged part."""
    sha256: str
    staged_requests: str
    """File of the rows' statistics."""
    requests_sha256: str
    staged_keys: str
    """File of the rows' keys."""
    keys_sha256: str
    num_reused: int = 0
    """Rows that were copied from another output."""

    @property
    def sha256_of(self) -> dict[str, str]:
        """Hash of each file that is staged."""
        return {
            self.staged_requests: self.requests_sha256,
            self.staged_keys: self.keys_sha256,
            self.staged: self.sha256,
        }


def stage(
    out: OutputDir,
    part: Part,
    table: pa.Table,
    requests: pa.Table,
    control_text_row_ids: list[int],
    keys: pa.Table = NO_KEYS,
    num_reused: int = 0,
) -> Draft:
    """Write a part that is made, statistics and keys of its rows, where nobody looks for them.

    Args:
        table: its rows, in input order.
        requests: the statistics of those that ran.
        control_text_row_ids: rows whose own text holds what looks like a control token.
        keys: ``KEYS_SCHEMA``, of the rows that have one.
        num_reused: rows that were copied from another output.

    Raises:
        StorageError: the file system refuses, or gives back other bytes than were written.
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
        del table  # before it is read back: a row may be half a gigabyte
        pa.default_memory_pool().release_unused()
        data = read_file(out.files, staged)
    try:
        check_part(pa.BufferReader(data), part)
    except ValueError as error:
        raise StorageError(
            f"{staged} was written and reads back wrong: {error}",
            hint="check the disk, then run again: finished rows are kept",
        ) from None
    return Draft(
        part.index,
        part.num_rows,
        error_codes,
        control_text_row_ids,
        _below_state(out, staged),
        len(data),
        hashlib.sha256(data).hexdigest(),
        _below_state(out, staged_requests),
        hashlib.sha256(statistics).hexdigest(),
        _below_state(out, staged_keys),
        hashlib.sha256(key_bytes).hexdigest(),
        num_reused,
    )


def publish(out: OutputDir, part: Part, draft: Draft) -> PartRecord:
    """Put a part that is staged in its place; when this returns, it counts as finished.

    Raises:
        StorageError: the file system refuses, or has other bytes than were staged; the part is
            then not finished.
    """
    final, requests = out.part_file(part), out.request_stats(part)
    publish_file(out.files, out.state / draft.staged_requests, requests)
    publish_file(out.files, out.state / draft.staged_keys, out.row_keys(part))
    publish_file(out.files, out.state / draft.staged, final)
    stat, requests_stat = out.files.stat(final), out.files.stat(requests)
    assert stat is not None
    assert requests_stat is not None
    if stat.size != draft.size:
        raise StorageError(
            f"{final} has {stat.size:,} bytes; {draft.size:,} were staged",
            hint="find out what else writes there, then run again: finished rows are kept",
        )
    record = PartRecord(
        draft.num_rows,
        draft.error_codes,
        draft.control_text_row_ids,
        stat.size,
        stat.mtime_ns,
        draft.sha256,
        draft.requests_sha256,
        stat.etag,
        requests_stat.etag,
        draft.keys_sha256,
        draft.num_reused,
    )
    out.write(out.record(part), record.to_json())
    return record


def _below_state(out: OutputDir, path: PurePath) -> str:
    return "/".join(path.relative_to(out.state).parts)


def _error_codes(table: pa.Table) -> dict[str, int]:
    errors = table["error"].drop_null().to_pylist() if "error" in table.schema.names else []
    return dict(sorted(Counter(error["code"] for error in errors).items()))
