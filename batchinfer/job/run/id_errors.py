"""Rows with bad ids, found once for a job and kept beside its output.

``_batchinfer/bad_ids.parquet`` holds their row ids alone. It only saves reading all ids again:
where it is missing, damaged or of another input, whoever runs rows finds the same anew.
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
    """The job with rows of bad ids as errors.

    Args:
        reads_stored: take what is kept beside the output, if it is of this job's input.

    Raises:
        DataError: the ids cannot be read, or are none.
    """
    column = job.spec.input.id_column
    if column is None:
        return job
    bad = _stored(job, column) if reads_stored else None
    found = find_bad_ids(job.source, column) if bad is None else bad
    return replace(job, source=replace(job.source, bad_ids=found))


def store_id_errors(job: OutputJob) -> None:
    """Keep rows with bad ids beside the output, unless they are there.

    Raises:
        StorageError: they cannot be written.
    """
    bad = job.source.bad_ids
    if bad is None or _stored(job, bad.column) is not None:
        return
    table = pa.table({"row_id": bad.rows, "first_row_id": bad.firsts})
    kept = table.replace_schema_metadata({_KEY: _key(job)})
    job.out.write_table(job.out.bad_ids, kept)


def _stored(job: OutputJob, column: str) -> BadIds | None:
    """What is kept beside the output; None where nothing is that can be used."""
    try:
        table = job.out.read_table(job.out.bad_ids)
        if (table.schema.metadata or {}).get(_KEY) != _key(job):
            return None
        rows, firsts = (table[name].to_numpy() for name in ("row_id", "first_row_id"))
    except (OSError, KeyError, pa.ArrowException):
        return None
    return BadIds(column, rows.astype(np.int64), firsts.astype(np.int64))


def _key(job: OutputJob) -> bytes:
    """Tells apart inputs, and what of them is selected."""
    contents = attrgetter("size", "num_rows", "content_sha256", "content_hash", "etag")
    files = list(map(contents, job.manifest.inputs))
    chosen = job.spec.input
    facts = [chosen.id_column, chosen.filter, job.source.num_rows, job.manifest.fingerprint, files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest().encode()
