"""The parts that a run makes, some at a time, and what earlier runs have left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa

from batchinfer.job.claims.crashes import CrashHistory, Group, count_deaths
from batchinfer.job.output.commit import Draft, publish
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import ResumePlan
from batchinfer.job.output.segments import Segments
from batchinfer.job.row_ids import (
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
    """Parts that a run makes, and the rows of them that are finished."""

    parts: Sequence[Part]
    """In order."""
    segments: Segments
    finished: RowIds = field(default_factory=lambda: NO_ROWS)
    """Rows of these parts that are in segments."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Segments that could not be read: name, and what is wrong."""
    crashes: CrashHistory = field(default_factory=CrashHistory)
    """Of these rows."""
    beside: frozenset[str] | None = None
    """Writers that make other parts now; None: the run makes these parts and no others later."""

    @property
    def missing(self) -> list[range]:
        """Rows that have to run or to be given up, in order, each range in one part."""
        return missing_ranges(self.parts, self.finished)

    @property
    def suspects(self) -> Sequence[Group]:
        """Rows suspected of deaths: each group runs with nothing else in the engine."""
        return self.crashes.groups

    def phases(self) -> Iterator[list[range]]:
        """Rows to run, in groups one after the other: suspects by themselves, then the others."""
        for group in self.suspects:
            yield ranges_in(self.parts, sorted_row_ids(group))
        apart = {*self.crashes.given_up, *(row for group in self.suspects for row in group)}
        rest = missing_ranges(self.parts, np.union1d(self.finished, sorted_row_ids(apart)))
        if rest:
            yield rest


class PartQueue(Protocol):
    """Parts that a run makes, some at a time."""

    is_shared: bool
    """Whether others take parts from it too."""

    @property
    def damaged(self) -> Mapping[str, str]:
        """Files that are damaged, as far as is known when the run begins: name, what is wrong."""
        ...

    @property
    def missing(self) -> list[range]:
        """Rows that have to run in any process, as far as is known when the run begins."""
        ...

    def next(self, is_over: Callable[[], bool]) -> PartsToMake | None:
        """The next parts; it may wait for what becomes of other workers.

        Args:
            is_over: whether no more parts are wanted.

        Returns:
            None: all parts are taken, or ``is_over``.

        Raises:
            JobError: the output directory cannot be read or written.
        """
        ...

    @property
    def check(self) -> Callable[[], None]:
        """Raises LockedError where others have taken over this process's parts."""
        ...

    @property
    def publish(self) -> Callable[[Part, Draft], object]:
        """Puts a staged part in its place; raises StorageError, or LockedError as ``check``."""
        ...


class KnownParts:
    """The queue of a run that knows its parts when it begins: all, or those of a shard.

    Args:
        publish: puts a staged part in its place.
        check: as ``PartQueue.check``.
    """

    is_shared = False

    def __init__(
        self,
        parts: PartsToMake,
        publish: Callable[[Part, Draft], object],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts: PartsToMake | None = parts
        self.damaged = parts.damaged
        self.missing = parts.missing
        self.publish = publish
        self.check = check

    def next(self, is_over: Callable[[], bool]) -> PartsToMake | None:
        """All parts, the first time."""
        parts = self._parts
        if not is_over():
            self._parts = None
            return parts
        return None


def all_parts(out: OutputDir, work: ResumePlan, generated: pa.Schema) -> KnownParts:
    """The parts of a run that writes alone, which holds the directory's lock.

    Args:
        generated: the output's generated columns.

    Raises:
        StorageError: the directory cannot be written to.
    """
    segments = Segments(out, work.manifest, work.todo, generated)
    if work.starts_over:
        return KnownParts(PartsToMake(work.todo, segments), partial(publish, out))
    finished, damaged = segments.recover()
    missing = missing_ranges(work.todo, finished)
    logs = out.files.entries(out.in_flight)
    history = count_deaths(out, logs, lambda rows: within(rows, missing))
    parts = PartsToMake(work.todo, segments, finished, damaged, history)
    return KnownParts(parts, partial(publish, out))


def parts_of(
    out: OutputDir,
    work: ResumePlan,
    parts: Sequence[Part],
    generated: pa.Schema,
    history: CrashHistory,
    *,
    is_owner: bool = True,
    beside: frozenset[str] | None = None,
) -> PartsToMake:
    """Parts that one of several writers makes.

    Args:
        history: of all rows.
        is_owner: whether nobody else makes any of them; else nothing is deleted.
        beside: as ``PartsToMake.beside``.
    """
    owned = {part.index for part in parts} if is_owner else ()
    segments = Segments(out, work.manifest, parts, generated, owned)
    if work.starts_over:
        return PartsToMake(parts, segments)
    finished, damaged = segments.recover()
    missing = missing_ranges(parts, finished)
    crashes = history.among(set(within(history.rows, missing).tolist()))
    return PartsToMake(parts, segments, finished, damaged, crashes, beside)


def unfinished_rows(out: OutputDir, work: ResumePlan, generated: pa.Schema, rows: RowIds) -> RowIds:
    """Those of some rows that are in no finished part and in no segment."""
    if not len(rows):
        return rows
    recorded = {path.stem for path in out.files.entries(out.parts)}
    parts = [
        part
        for part in work.manifest.parts()
        if part.name not in recorded and len(within(rows, [part.rows]))
    ]
    finished, _ = Segments(out, work.manifest, parts, generated, owned=()).recover()
    return within(rows, missing_ranges(parts, finished))
