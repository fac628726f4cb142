"""Finished rows that earlier runs have left of unfinished parts, and the rows that are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.recovery.quarantine import CrashHistory, Group, attribute_crashes
from batchinfer.job.output.resume import ResumePlan
from batchinfer.job.output.segments import Segments
from batchinfer.job.row_ids import NO_ROWS, Part, RowIds, missing_ranges, ranges_in, sorted_row_ids


@dataclass(frozen=True)
class RecoveredRows:
    """Finished rows of unfinished parts, left by earlier runs."""

    parts: Sequence[Part]
    """Parts to make, in order."""
    segments: Segments
    finished: RowIds
    """Rows of these parts that are in segments."""
    damaged: Mapping[str, str]
    """Segments that could not be read: name, and what is wrong."""
    crash_history: CrashHistory
    beside: frozenset[str] | None = None
    """Writers that make other parts now; None: whoever makes these parts makes no others later."""

    @property
    def groups(self) -> Sequence[Group]:
        """Rows suspected of deaths: each group runs with nothing else in the engine."""
        return self.crash_history.groups

    @property
    def given_up(self) -> Sequence[int]:
        """Rows that will not run again."""
        return self.crash_history.given_up

    @property
    def is_held(self) -> bool:
        """Whether a death without progress is remembered: the next must tell which rows ran."""
        return self.crash_history.is_held

    @property
    def num_missing(self) -> int:
        """Rows in ``missing``."""
        return sum(map(len, self.missing))

    @property
    def missing(self) -> list[range]:
        """Rows that have to run or to be given up, in order, each range in one part."""
        return missing_ranges(self.parts, self.finished)

    def phases(self) -> Iterator[list[range]]:
        """Rows to run, in groups one after the other: suspects by themselves, then the others."""
        for group in self.crash_history.groups:
            yield ranges_in(self.parts, sorted_row_ids(group))
        apart = {
            *self.crash_history.given_up,
            *(row for g in self.crash_history.groups for row in g),
        }
        rest = missing_ranges(self.parts, np.union1d(self.finished, sorted_row_ids(apart)))
        if rest:
            yield rest


def recover_rows(out: OutputDir, work: ResumePlan, generated: pa.Schema) -> RecoveredRows:
    """Find finished rows that earlier runs have left; call it under the lock.

    Args:
        work: the parts to make there.
        generated: the output's generated columns.

    Raises:
        StorageError: the directory cannot be written to.
    """
    segments = Segments(out, work.manifest, work.todo, generated, work.owned)
    finished, damaged = segments.recover()
    crash_history = attribute_crashes(out, missing_ranges(work.todo, finished))
    return RecoveredRows(work.todo, segments, finished, damaged, crash_history)


def from_scratch(out: OutputDir, work: ResumePlan, generated: pa.Schema) -> RecoveredRows:
    """No rows, where everything that is there will go first."""
    segments = Segments(out, work.manifest, work.todo, generated, work.owned)
    return RecoveredRows(work.todo, segments, NO_ROWS, {}, CrashHistory())
