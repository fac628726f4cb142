"""Gives a run the parts that it writes, together with their rows that are already finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from batchinfer.job.claims.crashed_rows import CrashHistory, Group, count_deaths
from batchinfer.job.output.commit import Draft, publish
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.finished_row_segments import Segments
from batchinfer.job.output.resume import ResumePlan
from batchinfer.job.row_ranges import (
    NO_ROWS,
    Part,
    RowIds,
    missing_ranges,
    ranges_in,
    sorted_row_ids,
    within,
)


@dataclass(frozen=True)
class PartsToMake:
    """The parts that a run has to write, and their rows that are already finished."""

    parts: Sequence[Part]
    """The parts, in order."""
    segments: Segments
    finished: RowIds = field(default_factory=lambda: NO_ROWS)
    """Ids of the rows of ``parts`` that are finished and stored in segments."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """What is wrong with each segment that could not be read, keyed by the segment's name."""
    crashes: CrashHistory = field(default_factory=CrashHistory)
    """The crash history of the rows of ``parts``."""
    other_writers: frozenset[str] | None = None
    """Names of the writers that are working on other parts; None if this run claims no further
    parts."""

    @property
    def missing(self) -> list[range]:
        """Rows to run, and rows that are given up, as ordered ranges that each lie in one part."""
        return missing_ranges(self.parts, self.finished)

    @property
    def suspects(self) -> Sequence[Group]:
        """Groups of rows suspected of crashes. Each group runs alone in the engine."""
        return self.crashes.groups

    def phases(self) -> Iterator[list[range]]:
        """Yield the rows to run: first each group of suspects, then the rest."""
        for group in self.suspects:
            yield ranges_in(self.parts, sorted_row_ids(group))
        apart = {*self.crashes.given_up, *(row for group in self.suspects for row in group)}
        rest = missing_ranges(self.parts, np.union1d(self.finished, sorted_row_ids(apart)))
        if rest:
            yield rest


class PartQueue:
    """Hands out all parts of a run at once. Subclasses may claim parts during the run instead.

    Args:
        parts: the parts of the run, or, for a worker, all parts that it may claim.
        publish: moves a staged part to its final place; raises StorageError, or LockedError for
            the same reason as ``check``.
        check: raises LockedError if other processes have taken over this process's parts.
    """

    is_shared = False
    """True if other processes may claim parts of the same output."""

    def __init__(
        self,
        parts: PartsToMake,
        publish: Callable[[Part, Draft], object],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts: PartsToMake | None = parts
        self.damaged = parts.damaged
        self.missing = parts.missing
        """Rows that were unfinished when the run began, whichever process runs them."""
        self.publish = publish
        self.check = check
        self.on_made_elsewhere: Callable[[Sequence[Part]], None] = lambda parts: None
        """Called with the parts that other processes have written since the last call."""

    def next(self, is_over: Callable[[], bool]) -> PartsToMake | None:
        """Return the next parts; None if all parts are taken or ``is_over`` returns True.

        A worker may wait in this call until other workers have finished or freed their parts.

        Args:
            is_over: returns True once the run wants no more parts.

        Raises:
            JobError: the output directory cannot be read or written.
        """
        if is_over():
            return None
        parts, self._parts = self._parts, None
        return parts


def all_parts(out: OutputDir, plan: ResumePlan, generated: pa.Schema) -> PartQueue:
    """Return the parts of a run that writes alone. The caller holds the directory's lock."""
    parts = _parts_to_make(Segments(out, plan.manifest, plan.todo, generated), plan, plan.todo)
    if not plan.starts_over:
        logs = out.files.entries(out.in_flight)
        crashes = count_deaths(out, logs, lambda rows: within(rows, parts.missing))
        parts = replace(parts, crashes=crashes)
    return PartQueue(parts, partial(publish, out))


def parts_of_writer(
    out: OutputDir,
    plan: ResumePlan,
    parts: Sequence[Part],
    generated: pa.Schema,
    history: CrashHistory,
    *,
    is_owner: bool = True,
    other_writers: frozenset[str] | None = None,
) -> PartsToMake:
    """Return the parts that one of several writers works on, with their finished rows.

    Args:
        history: the crash history of all rows.
        is_owner: False if other writers work on some of the parts; this function then deletes
            nothing.
        other_writers: see ``PartsToMake.other_writers``.
    """
    owned = {part.index for part in parts} if is_owner else ()
    to_make = _parts_to_make(Segments(out, plan.manifest, parts, generated, owned), plan, parts)
    crashes = history.among(set(within(history.rows, to_make.missing).tolist()))
    return replace(to_make, crashes=crashes, other_writers=other_writers)


def _parts_to_make(segments: Segments, plan: ResumePlan, parts: Sequence[Part]) -> PartsToMake:
    return PartsToMake(parts, segments, *(() if plan.starts_over else segments.recover()))


def unfinished_rows(out: OutputDir, plan: ResumePlan, generated: pa.Schema, rows: RowIds) -> RowIds:
    """Return the ``rows`` that are in no finished part and in no segment."""
    if not len(rows):
        return rows
    recorded = {path.stem for path in out.files.entries(out.parts)}
    parts = [
        part
        for part in plan.manifest.parts()
        if part.name not in recorded and len(within(rows, [part.rows]))
    ]
    finished, _ = Segments(out, plan.manifest, parts, generated, owned=()).recover()
    return within(rows, missing_ranges(parts, finished))
