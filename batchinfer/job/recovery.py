"""What earlier runs have left of the parts that are not finished, and what is left to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchinfer.job.existing import Work
from batchinfer.job.flight import assess
from batchinfer.job.output import OutputDir
from batchinfer.job.row_ids import NO_ROWS, Part, RowIds, missing_ranges, ranges_in, sorted_row_ids
from batchinfer.job.segments import Segments
from batchinfer.job.suspects import Suspicion


@dataclass(frozen=True)
class Left:
    """Where the parts of a run stand before it."""

    parts: Sequence[Part]
    """Parts to make, in order."""
    segments: Segments
    finished: RowIds
    """Rows of these parts that are in segments."""
    damaged: Mapping[str, str]
    """Segments that could not be read: name, and what is wrong."""
    suspicion: Suspicion

    @property
    def missing(self) -> list[range]:
        """Rows that have to run or to be given up, in order, each range in one part."""
        return missing_ranges(self.parts, self.finished)

    def phases(self) -> Iterator[list[range]]:
        """What to run, one after the other with nothing beside it: suspects, then the others."""
        for group in self.suspicion.groups:
            yield ranges_in(self.parts, sorted_row_ids(group))
        apart = {*self.suspicion.given_up, *(row for g in self.suspicion.groups for row in g)}
        rest = missing_ranges(self.parts, np.union1d(self.finished, sorted_row_ids(apart)))
        if rest:
            yield rest


def recover(out: OutputDir, work: Work, generated: pa.Schema) -> Left:
    """Find what earlier runs have left; call it under the lock.

    Args:
        out: the output directory.
        work: what is to do there.
        generated: the output's generated columns.

    Raises:
        StorageError: the directory cannot be written to.
    """
    segments = Segments(out, work.manifest, work.todo, generated)
    finished, damaged = segments.recover()
    suspicion = assess(out, missing_ranges(work.todo, finished))
    return Left(work.todo, segments, finished, damaged, suspicion)


def from_scratch(out: OutputDir, work: Work, generated: pa.Schema) -> Left:
    """Where everything that is there will go first."""
    segments = Segments(out, work.manifest, work.todo, generated)
    return Left(work.todo, segments, NO_ROWS, {}, Suspicion())
