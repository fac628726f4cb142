"""A lease as its worker runs it: rows to run, rows finished, parts made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from threading import Lock

import numpy as np
import pyarrow as pa

from batchinfer.job.fleet.lease import Ranges, Share, row_ids_of
from batchinfer.job.fleet.messages import Assignment
from batchinfer.job.job import OutputJob
from batchinfer.job.output.commit import Draft, hand_over
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.output.segments import Segments
from batchinfer.job.row_ids import (
    NO_ROWS,
    Part,
    RowIds,
    in_range,
    missing_ranges,
    ranges_in,
    sorted_row_ids,
)
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.requests.requests import PromptRow

Wrote = Callable[[str, Mapping[int, int]], None]
"""Told of a segment: its name, and the row group of each part's rows."""


class LeaseSegments(Segments):
    """The segments with rows of a lease's parts; none is this worker's to delete."""

    def __init__(self, job: OutputJob, parts: Sequence[Part], wrote: Wrote) -> None:
        schema = job.table.generated_schema
        super().__init__(job.out, job.manifest, parts, schema, owned=range(0))
        self._wrote = wrote

    def add(self, table: pa.Table) -> PurePath:
        path = super().add(table)
        self._wrote(path.name, self.groups_of(path))
        return path


class LeaseRun:
    """One lease.

    The engine's thread takes its rows (``admit``). All else happens in the writing thread.

    Args:
        metadata: key-value metadata of every part.
        before_write: called before finished rows are written.
        deliver: told of each part that is staged.
        wrote: told of each segment.
    """

    def __init__(
        self,
        job: OutputJob,
        assignment: Assignment,
        metadata: Mapping[str, str],
        before_write: Callable[[], None],
        deliver: Callable[[Draft], None],
        wrote: Wrote,
    ) -> None:
        self.fence = assignment.lease.fence
        self._out = job.out
        shares = assignment.lease.shares
        self.parts = [share.part for share in shares]
        segments = LeaseSegments(job, self.parts, wrote)
        finished = _adopted(segments, [job.out.segments / name for name in assignment.segments])
        ranges = [rows for share in shares for rows in _to_run(share, finished)]
        row_ids = _row_ids(job, ranges)
        self.given_up = np.intersect1d(row_ids, assignment.given_up)
        runs = np.setdiff1d(row_ids, self.given_up)
        self.ranges = ranges_in(self.parts, runs) if len(self.given_up) else ranges
        self.num_left = len(row_ids)
        """Rows that are neither finished nor given back."""
        self._leased = {share.part.index: row_ids_of(share.rows) for share in shares}
        self._unadmitted = set(runs.tolist())
        self._lock = Lock()
        self._has_begun = False
        self._writer = PartWriter(
            job.out,
            self.parts,
            segments,
            np.setdiff1d(_row_ids(job, [part.rows for part in self.parts]), row_ids),
            job.table,
            job.source,
            metadata,
            before_write,
            partial(self._deliver, deliver),
        )
        for share in shares:
            if not share.makes:
                self._writer.leave(share.part)

    @property
    def num_unadmitted(self) -> int:
        """Rows that the engine has not got yet."""
        return len(self._unadmitted)

    @property
    def is_done(self) -> bool:
        """Whether it has begun and no row is left."""
        return self._has_begun and not self.num_left

    def begin(self, failed: Callable[[int], FinishedRow]) -> None:
        """Write the rows that were given up, and make the parts that lack none."""
        self._has_begun = True
        self._writer.write_complete()
        for row_id in self.given_up.tolist():
            self.add(failed(row_id))

    def admit(self, rows: Sequence[PromptRow]) -> list[PromptRow]:
        """Those of ``rows`` that have not been given back: they run now."""
        with self._lock:
            kept = [row for row in rows if row.row_id in self._unadmitted]
            self._unadmitted.difference_update(row.row_id for row in kept)
        return kept

    def has_unadmitted_from(self, row_id: int) -> bool:
        """Whether a row that is still to run is this or a later one."""
        with self._lock:
            return any(row >= row_id for row in self._unadmitted)

    def give_back(self, count: int) -> RowIds:
        """Give back ``count`` rows that the engine has not got, the last ones, or fewer."""
        with self._lock:
            rows = sorted(self._unadmitted)[-count:] if count else []
            given = sorted_row_ids(rows)
            given = np.concatenate(
                [NO_ROWS, *(self._leased_of(part, given) for part in self.parts)]
            )
            self._unadmitted.difference_update(given.tolist())
        for part in self.parts:
            if len(in_range(given, part.rows)):
                self._writer.leave(part)
        self.num_left -= len(given)
        self._writer.write_complete()
        return given

    def add(self, row: FinishedRow) -> None:
        """Take a finished row."""
        self._writer.add(row)
        self.num_left -= 1

    def add_table(self, rows: pa.Table) -> None:
        """Take finished rows, with the columns of a segment."""
        self._writer.add_table(rows)
        self.num_left -= rows.num_rows
        self._writer.flush_if_due()

    def flush_if_due(self) -> None:
        """Put finished rows on disk from time to time."""
        self._writer.flush_if_due()

    def flush(self) -> None:
        """Put all finished rows on disk."""
        self._writer.flush()

    def _leased_of(self, part: Part, row_ids: RowIds) -> RowIds:
        """Those of a part's rows that the ledger knows to be here: of a damaged segment, others
        run too."""
        return np.intersect1d(in_range(row_ids, part.rows), self._leased[part.index])

    def _deliver(self, deliver: Callable[[Draft], None], part: Part, draft: Draft) -> None:
        failpoint("draft-staged")
        deliver(hand_over(self._out, draft, self.fence))
        failpoint("draft-told")


def _row_ids(job: OutputJob, ranges: Sequence[range]) -> RowIds:
    """The selected rows in some ranges."""
    return np.concatenate([NO_ROWS, *map(job.source.row_ids, ranges)])


def _adopted(segments: Segments, files: Sequence[PurePath]) -> RowIds:
    """Rows that are in segments; those of a damaged one have to run again."""
    found = [NO_ROWS]
    for path in files:
        with suppress(OSError, ValueError, pa.ArrowException):
            found.append(segments.adopt(path))
    return np.unique(np.concatenate(found))


def _to_run(share: Share, finished: RowIds) -> Ranges:
    """Rows of a share to run: where it makes the part, whatever is not in segments."""
    if share.makes:
        return tuple(missing_ranges([share.part], finished))
    row_ids = np.setdiff1d(row_ids_of(share.rows), finished)
    return tuple(ranges_in([share.part], row_ids))
