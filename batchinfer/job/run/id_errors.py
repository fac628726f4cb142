"""Finds rows with missing or duplicate ids once for a job, and stores them with its output.

``_batchinfer/bad_ids.parquet`` holds their row ids, so that later runs need not read all ids again.
If the file is missing, damaged or of another input, a run finds the rows in the input again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pyarrow as pa

from batchinfer.job.input.unique_ids import BadIds, find_bad_ids
from batchinfer.job.job import OutputJob

_KEY = b"batchinfer.ids_of"


def with_id_errors(job: OutputJob, *, reads_stored: bool) -> OutputJob:
    """Return the job with its rows that have bad ids; these rows end as errors.

    Args:
        reads_stored: True to use the stored rows if they are of this job's input.

    Raises:
        DataError: the ids cannot be read, or have a type that ids cannot have.
    """
    column = job.spec.input.id_column
    if column is None:
        return job
    stored = _stored(job, column) if reads_stored else None
    bad = find_bad_ids(job.source, column) if stored is None else stored
    return replace(job, source=replace(job.source, bad_ids=bad))


def store_id_errors(job: OutputJob) -> None:
    """Store the rows with bad ids, unless they are stored already.

    Raises:
        StorageError: the rows cannot be written.
    """
    bad = job.source.bad_ids
    if bad is None or _stored(job, bad.column) is not None:
        return
    table = pa.table({"row_id": bad.rows, "first_row_id": bad.firsts})
    job.out.write_table(job.out.bad_ids, table.replace_schema_metadata({_KEY: _input_key(job)}))


def _stored(job: OutputJob, column: str) -> BadIds | None:
    """Return the stored rows; None if no rows of this input are stored."""
    try:
        table = job.out.read_table(job.out.bad_ids)
        if (table.schema.metadata or {}).get(_KEY) != _input_key(job):
            return None
        rows, firsts = (table[name].to_numpy() for name in ("row_id", "first_row_id"))
    except (OSError, KeyError, pa.ArrowException):
        return None
    return BadIds(column, rows.astype(np.int64), firsts.astype(np.int64))


def _input_key(job: OutputJob) -> bytes:
    contents = attrgetter("size", "num_rows", "content_sha256", "content_hash", "etag")
    files = list(map(contents, job.manifest.inputs))
    selection = job.spec.input
    facts = [selection.id_column, selection.filter, job.source.num_rows]
    return (
        hashlib.sha256(json.dumps([*facts, job.manifest.fingerprint, files]).encode())
        .hexdigest()
        .encode()
    )
