"""A job's stored statistics, read a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from pathlib import PurePath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.segments import REQUEST_COLUMN
from batchinfer.job.output.stats_tables import STEPS_SCHEMA
from batchinfer.job.run_ids import writer_of
from batchinfer.job.stats.recorder import Run
from batchinfer.report.histograms import COLUMNS as REQUEST_COLUMNS
from batchinfer.report.histograms import Float, Lengths
from batchinfer.report.timeline import COLUMNS as STEP_COLUMNS
from batchinfer.report.timeline import Timeline

_BATCH_ROWS = 16384
UNREADABLE = (OSError, pa.ArrowException, KeyError, ValueError)
"""What a file raises that is damaged, or that a running job has just put into another."""


def batches(
    out: OutputDir, path: PurePath, columns: Sequence[str], rows: int = _BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Batches of some columns of a Parquet file, as far as it can be read."""
    try:
        with out.files.open(path) as file:
            reader = pq.ParquetFile(file, pre_buffer=False)
            yield from reader.iter_batches(rows, columns=list(columns), use_threads=False)
    except UNREADABLE:
        return


def read_timeline(
    out: OutputDir, files: Sequence[PurePath], runs: Sequence[Run], merged: bool
) -> Timeline:
    """Timeline of the steps of all runs, one after the other or beside each other as they were.

    Args:
        files: of steps, in order.
        merged: whether the steps that runs have not put into files are in ``files``.
    """
    rest = [] if merged else [run.unsampled for run in runs if run.unsampled is not None]
    last = [pa.RecordBatch.from_pylist([row], schema=STEPS_SCHEMA) for row in rest]
    ends: dict[str, float] = {run.run_id: 0.0 for run in runs}
    for batch in chain(_of_files(out, files, ("run_id", "t_s")), last):
        for run_id, part in _by_run(batch):
            ends[run_id] = max(ends.get(run_id, 0.0), float(_column(part, "t_s").max()))
    offsets = _offsets(runs, ends)
    timeline = Timeline(max((offsets[run_id] + end for run_id, end in ends.items()), default=0.0))
    timeline.began_s = offsets
    sizes = {run.run_id: run.kv for run in runs if run.kv}
    began = dict.fromkeys(ends, 0.0)
    for batch in chain(_of_files(out, files, ("run_id", *STEP_COLUMNS)), last):
        for run_id, part in _by_run(batch):
            if run_id not in sizes:
                continue  # how large its blocks were is not known
            steps = {name: _column(part, name) for name in STEP_COLUMNS}
            kv = sizes[run_id]
            timeline.add(
                steps,
                began[run_id],
                offsets[run_id],
                kv["block_size"],
                kv["bytes_per_block"],
                run_id,
            )
            began[run_id] = max(began[run_id], float(steps["t_s"].max()))
    return timeline


def _offsets(runs: Sequence[Run], ends: Mapping[str, float]) -> dict[str, float]:
    """When each run's clock began, in seconds since the first one's, less those when none ran.

    Args:
        ends: when the runs' last steps ended, on their own clocks.
    """
    began = {run.run_id: run.saved_at - run.engine_s for run in runs if writer_of(run.run_id)}
    offsets: dict[str, float] = {}
    span_s = 0.0
    for are_beside, group in groupby(sorted(ends), began.__contains__):
        left_out_s = -math.inf
        for run_id in sorted(group, key=lambda run_id: (began.get(run_id, 0.0), run_id)):
            offsets[run_id] = span_s
            if are_beside:
                left_out_s = max(left_out_s, began[run_id] - span_s)
                offsets[run_id] = began[run_id] - left_out_s
            span_s = max(span_s, offsets[run_id] + ends[run_id])
    return offsets


class FinishedRows:
    """Rows of finished parts: a segment may hold some of them still.

    Args:
        ranges: the parts' rows, in order.
    """

    def __init__(self, ranges: Sequence[range]) -> None:
        self._starts = np.array([rows.start for rows in ranges], np.int64)
        self._stops = np.array([0, *(rows.stop for rows in ranges)], np.int64)

    def left_out(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of ``batch`` that are in no finished part."""
        row_ids = batch.column("row_id").to_numpy()
        at = np.searchsorted(self._starts, row_ids, side="right")
        return batch.filter(pa.array(row_ids >= self._stops[at]))


def read_lengths(
    out: OutputDir, files: Iterable[PurePath], segments: Iterable[PurePath], done: FinishedRows
) -> Lengths:
    """Lengths and times of rows: of finished parts, by ``files``, and of others by segments."""
    lengths = Lengths()
    for path in files:
        for batch in batches(out, path, REQUEST_COLUMNS):
            lengths.add({name: _column(batch, name) for name in REQUEST_COLUMNS})
    for path in segments:
        for batch in batches(out, path, ["row_id", REQUEST_COLUMN]):
            ran = done.left_out(batch).column(REQUEST_COLUMN).drop_null()
            requests = pa.RecordBatch.from_struct_array(ran)
            lengths.add({name: _column(requests, name) for name in REQUEST_COLUMNS})
    return lengths


def _of_files(
    out: OutputDir, files: Iterable[PurePath], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    for path in files:
        yield from batches(out, path, columns)


def _by_run(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Slices of consecutive rows of one run."""
    codes = batch.column("run_id").dictionary_encode()
    changes = np.flatnonzero(np.diff(codes.indices.to_numpy())) + 1
    bounds = [0, *changes.tolist(), len(batch)]
    for start, stop in pairwise(bounds):
        if stop > start:
            yield batch.column("run_id")[start].as_py(), batch.slice(start, stop - start)


def _column(batch: pa.RecordBatch, name: str) -> Float:
    """A column's values; zeros for one that there was not yet when the job ran."""
    if name not in batch.schema.names:
        return np.zeros(len(batch))
    return np.asarray(batch.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)
