"""Reads a job's stored statistics, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import PurePath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.finished_row_segments import REQUEST_COLUMN
from batchinfer.job.output.stats_tables import STEPS_SCHEMA
from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.run_record import Run
from batchinfer.report.histograms import COLUMNS as REQUEST_COLUMNS
from batchinfer.report.histograms import Lengths
from batchinfer.report.timeline import COLUMNS as STEP_COLUMNS
from batchinfer.report.timeline import Float, Timeline

_BATCH_ROWS = 16384
UNREADABLE = (OSError, pa.ArrowException, KeyError, ValueError)
"""Errors from reading a damaged file, or a file that a running job has just merged into another.
"""


def batches(
    out: OutputDir, path: PurePath, columns: Sequence[str], rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield batches of some columns of a Parquet file; stop where the file is damaged."""
    try:
        with out.files.open(path) as file:
            reader = pq.ParquetFile(file, pre_buffer=False)
            yield from reader.iter_batches(rows, columns=list(columns), use_threads=False)
    except UNREADABLE:
        return


def read_timeline(
    out: OutputDir, files: Sequence[PurePath], runs: Sequence[Run], merged: bool
) -> Timeline:
    """Return the steps of all runs on one timeline, on which runs may overlap.

    Args:
        files: files of steps, in order.
        merged: True if ``files`` include the last steps of each run.
    """
    last = [] if merged else [run.unsampled for run in runs if run.unsampled is not None]

    def steps(*columns: str) -> Iterator[tuple[str, dict[str, Float]]]:
        for path in files:
            for batch in batches(out, path, ("run_id", *columns)):
                yield from _by_run(batch, columns)
        for row in last:
            yield from _by_run(pa.RecordBatch.from_pylist([row], schema=STEPS_SCHEMA), columns)

    ends = {run.run_id: 0.0 for run in runs}
    for run_id, part in steps("t_s"):
        ends[run_id] = max(ends.get(run_id, 0.0), float(part["t_s"].max()))
    offsets = _offsets(runs, ends)
    timeline = Timeline(max((offsets[run_id] + end for run_id, end in ends.items()), default=0.0))
    timeline.began_s = offsets
    pools = {run.run_id: run.kv for run in runs if run.kv}
    began = dict.fromkeys(ends, 0.0)
    for run_id, part in steps(*STEP_COLUMNS):
        if (kv := pools.get(run_id)) is None:
            continue  # the run's block size is unknown
        sizes = kv["block_size"], kv["bytes_per_block"]
        timeline.add(part, began[run_id], offsets[run_id], *sizes, run_id)
        began[run_id] = max(began[run_id], float(part["t_s"].max()))
    return timeline


def _offsets(runs: Sequence[Run], ends: Mapping[str, float]) -> dict[str, float]:
    """Return the start of each run's clock in seconds, on a timeline that skips times without a
    run.

    Args:
        ends: end of each run's last step on the run's clock.
    """
    began = {run.run_id: run.saved_at - run.engine_s for run in runs if writer_of(run.run_id)}
    offsets: dict[str, float] = {}
    span_s = 0.0
    for are_parallel, group in groupby(sorted(ends), began.__contains__):
        skipped_s = -math.inf
        for run_id in sorted(group, key=lambda run_id: (began.get(run_id, 0.0), run_id)):
            offsets[run_id] = span_s
            if are_parallel:
                skipped_s = max(skipped_s, began[run_id] - span_s)
                offsets[run_id] = began[run_id] - skipped_s
            span_s = max(span_s, offsets[run_id] + ends[run_id])
    return offsets


class FinishedRows:
    """The row ids of finished parts. Segments may still hold copies of some of these rows."""

    def __init__(self, ranges: Sequence[range]) -> None:
        self._starts = np.array([rows.start for rows in ranges], np.int64)
        self._stops = np.array([0, *(rows.stop for rows in ranges)], np.int64)

    def removed_from(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of ``batch`` that are in no finished part."""
        row_ids = batch.column("row_id").to_numpy()
        at = np.searchsorted(self._starts, row_ids, side="right")
        return batch.filter(pa.array(row_ids >= self._stops[at]))


def read_lengths(
    out: OutputDir, files: Iterable[PurePath], segments: Iterable[PurePath], done: FinishedRows
) -> Lengths:
    """Return lengths and times of rows; ``files`` hold finished parts, ``segments`` other rows."""
    lengths = Lengths()
    for path in files:
        for batch in batches(out, path, REQUEST_COLUMNS):
            lengths.add(_columns(batch, REQUEST_COLUMNS))
    for path in segments:
        for batch in batches(out, path, ["row_id", REQUEST_COLUMN]):
            requests = done.removed_from(batch).column(REQUEST_COLUMN).drop_null()
            lengths.add(_columns(pa.RecordBatch.from_struct_array(requests), REQUEST_COLUMNS))
    return lengths


def _by_run(
    batch: pa.RecordBatch, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, Float]]]:
    """Split a batch into consecutive rows of one run; yield the run's id and the rows' columns."""
    codes = batch.column("run_id").dictionary_encode().indices.to_numpy()
    bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(batch)]
    for start, stop in pairwise(bounds):
        if stop > start:
            run_id = batch.column("run_id")[start].as_py()
            yield run_id, _columns(batch.slice(start, stop - start), columns)


def _columns(batch: pa.RecordBatch, names: Sequence[str]) -> dict[str, Float]:
    """Return columns, keyed by name; zeros for a column that an older version did not write."""
    return {
        name: batch.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
        if name in batch.schema.names
        else np.zeros(len(batch))
        for name in names
    }
