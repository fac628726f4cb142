"""Writes finished rows, which arrive in any order, to parts in input order."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.job.input.dataset import Source
from batchinfer.job.output.commit import Draft, stage
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.finished_row_segments import (
    CONTROL_TEXT_COLUMN,
    REQUEST_COLUMN,
    Segments,
    segment_table,
)
from batchinfer.job.output.schema import OutputTable
from batchinfer.job.output.stats_tables import WORKER, requests_table, with_worker
from batchinfer.job.row_ranges import Part, RowIds, in_range
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.rows.row_key import KEY_COLUMN, KEYS_SCHEMA

FLUSH_ROWS = 4096
_MOST_HELD_BYTES = 64 << 20
"""Maximum size in bytes of the tables in memory; the rows of more tables go to a segment."""
_MOST_KEPT_BYTES = 64 << 20
"""If a part's kept columns are larger than this, the input file is closed while the part is
written. Closing the file frees the pages that its reader holds; a single page may be just as large.
"""


class PartWriter:
    """Writes each part, in order, once all its rows are finished; keeps other rows in segments.

    The writer holds the rows of the last few seconds in memory, without the kept input columns,
    which are read again for each part.

    Args:
        parts: the parts to write, in order.
        segments: stores finished rows until their part is written.
        finished: rows of these parts that are in segments already.
        table: the columns of parts.
        source: the dataset with the kept columns.
        metadata: key-value metadata of every part.
        before_write: called before finished rows are written.
        deliver: called with each staged part to publish it.
    """

    def __init__(
        self,
        out: OutputDir,
        parts: Sequence[Part],
        segments: Segments,
        finished: RowIds,
        table: OutputTable,
        source: Source,
        metadata: Mapping[str, str],
        before_write: Callable[[], None],
        deliver: Callable[[Part, Draft], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._parts = parts
        self._segments = segments
        self._table = table
        self._source = source
        self._kept = self._scan_kept(0)
        self._metadata = dict(metadata)
        self._before_write = before_write
        self._deliver = deliver
        self._clock = clock
        self._flushed_at = clock()
        self._rows: dict[int, FinishedRow] = {}
        self._tables: list[pa.Table] = []
        """Rows that were added as tables."""
        self._first_rows = [part.rows.start for part in parts]
        self._missing = [part.num_rows - len(in_range(finished, part.rows)) for part in parts]
        self._num_written = 0

    def add(self, row: FinishedRow) -> None:
        """Add a finished row, and write the parts that it completes.

        Raises:
            DataError: the kept columns of the input cannot be read.
            StorageError: a part cannot be written.
        """
        row_id: int = row.values["row_id"]
        at = bisect_right(self._first_rows, row_id) - 1
        assert row_id not in self._rows, f"row {row_id} finished twice"
        assert self._missing[at], f"row {row_id}, or a row of its part, finished twice"
        self._rows[row_id] = row
        self._missing[at] -= 1
        self.write_complete()

    def add_table(self, rows: pa.Table) -> None:
        """Add finished rows, in any order, with the columns of a segment. Errors are those of
        ``add``."""
        at = np.searchsorted(self._first_rows, rows["row_id"].to_numpy(), side="right") - 1
        for index, count in zip(*np.unique(at, return_counts=True), strict=True):
            assert self._missing[index] >= count, "rows finished twice"
            self._missing[index] -= int(count)
        self._tables.append(rows)
        self.write_complete()
        if sum(table.nbytes for table in self._tables) > _MOST_HELD_BYTES:
            self.flush()

    @property
    def is_done(self) -> bool:
        return self._num_written == len(self._parts)

    def write_complete(self) -> None:
        """Write the complete parts, up to the first incomplete one."""
        for part in self._parts[self._num_written :]:
            if self._missing[self._num_written] == 0:
                self._write(part)
            else:
                return
            self._num_written += 1

    def flush_if_due(self) -> None:
        """Flush if the last flush was at least ``flush_every_s`` ago, or if at least ``FLUSH_ROWS``
        rows are in memory."""
        waited = self._clock() - self._flushed_at
        if waited >= self._out.files.flush_every_s or self._num_held >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write all rows held in memory to a segment."""
        self._before_write()
        if self._num_held:
            rows = segment_table(self._rows.values(), self._segments.schema)
            self._segments.add(pa.concat_tables([rows, *self._tables]))
            self._rows.clear()
            self._tables.clear()
        self._flushed_at = self._clock()

    @property
    def _num_held(self) -> int:
        in_tables: int = sum(table.num_rows for table in self._tables)
        return len(self._rows) + in_tables

    def _write(self, part: Part) -> None:
        self._before_write()
        fewer = min(part.rows, self._rows, key=len)
        both = [row_id for row_id in fewer if row_id in part.rows and row_id in self._rows]
        in_memory = [self._rows[row_id] for row_id in both]
        of_part, rest = _divided(self._tables, part)
        held = pa.concat_tables([segment_table(in_memory, self._segments.schema), *of_part])
        rows = pa.concat_tables(
            [self._segments.rows_of(part), with_worker(held, self._out.writer)]
        ).sort_by("row_id")
        draft = stage(
            self._out,
            part,
            self._part_table(part, rows),
            requests_table(rows["row_id"], rows[REQUEST_COLUMN], rows[WORKER]),
            rows["row_id"].filter(rows[CONTROL_TEXT_COLUMN]).to_pylist(),
            rows.select(KEYS_SCHEMA.names).filter(rows[KEY_COLUMN].is_valid()),
            _num_reused(rows),
        )
        self._deliver(part, draft)
        for row in in_memory:
            del self._rows[row.values["row_id"]]
        self._tables = rest
        self._segments.drop(part)

    def _part_table(self, part: Part, rows: pa.Table) -> pa.Table:
        generated = rows.select(self._table.generated_schema.names).combine_chunks()
        table = self._table.columns(self._kept_of(part), generated)
        return table.replace_schema_metadata(self._metadata)

    def _kept_of(self, part: Part) -> list[pa.RecordBatch]:
        """Read a part's kept columns. Parts must be read in order; no batch spans two parts."""
        batches: list[pa.RecordBatch] = []
        missing = part.num_rows if self._table.kept else 0
        while missing:
            _, batch = next(self._kept)
            batches.append(batch)
            missing -= len(batch)
        if sum(batch.nbytes for batch in batches) > _MOST_KEPT_BYTES:
            self._kept = self._scan_kept(self._num_written + 1)
            pa.default_memory_pool().release_unused()
        return batches

    def _scan_kept(self, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        return self._source.scan(
            list(self._table.kept), [part.rows for part in self._parts[first:]]
        )


def _divided(tables: Sequence[pa.Table], part: Part) -> tuple[list[pa.Table], list[pa.Table]]:
    inside, outside = list[pa.Table](), list[pa.Table]()
    for table in tables:
        row_ids = table["row_id"].to_numpy()
        is_inside = (row_ids >= part.rows.start) & (row_ids < part.rows.stop)
        for tables_of, mask in ((inside, is_inside), (outside, ~is_inside)):
            if mask.any():
                tables_of.append(table if mask.all() else table.filter(pa.array(mask)))
    return inside, outside


def _num_reused(rows: pa.Table) -> int:
    """Return the number of successful rows that no run of this job has computed."""
    good = pc.equal(rows["status"], "ok")
    count: int = pc.sum(pc.and_(good, rows[REQUEST_COLUMN].is_null())).as_py() or 0
    return count
