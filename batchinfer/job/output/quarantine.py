"""Quarantine of rows that make the process die: rows in flight, suspects, rows given up.

The log that a run keeps of its rows in flight is ``run/in_flight_log.py``. Here it is read.
``_batchinfer/in_flight/<run id>`` holds row ids, 8 bytes each: a row's when its prompt is about to
be made, its complement (``~id``) when that is made, its id again when it is handed to the engine.
A run that ends in order deletes the file. It is not synced: what matters is that the process dies,
and what it has written outlives that. In a store it does so some seconds later only, too late for
a row that kills at once: after a death the next run has each row there before it runs.

A thousand innocent rows are in flight whenever a process is killed. So a death means nothing as
long as rows finish between one and the next. Two deaths without that make the rows in flight at
both suspects. Suspects run by halves with nothing beside them; a half that dies is halved again.
A row is given up only when the process has died twice while it ran alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, TypeAdapter

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.row_ids import RowIds, sorted_row_ids, within
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors

CRASHES_TO_SUSPECT = 2
DEATHS_TO_GIVE_UP = 2

Group = tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
"""Row ids."""

LOG_ENTRY = np.dtype("<i8")
"""Entry of a log of rows in flight."""


@dataclass(frozen=True)
class CrashHistory:
    """Deaths of earlier runs, and the rows that are suspected of them."""

    __pydantic_config__: ClassVar = STRICT

    crashes: NonNegativeInt = 0
    """Deaths in a row without a row finished in between."""
    in_flight: Group = ()
    """Rows that were in flight at each of them."""
    groups: tuple[Group, ...] = ()
    """Suspects: each group runs with nothing beside it, in this order, before all other rows."""
    deaths: NonNegativeInt = 0
    """How often the process died while the first group, a single row, ran."""
    given_up: Group = ()
    """Rows that will not run again."""
    last_run: str = ""
    """The last run whose death is counted."""

    def after_death(self, run_id: str, in_flight: Set[int], finished: Set[int]) -> CrashHistory:
        """The history with the death of one more run.

        Args:
            in_flight: rows the engine had been given that are not finished.
            finished: rows the engine had been given that are finished, and on disk.
        """
        return replace(self._after(in_flight, finished), last_run=run_id)

    def _after(self, in_flight: Set[int], finished: Set[int]) -> CrashHistory:
        if not in_flight:  # it died before or after its work
            return self
        for at, group in enumerate(self.groups):
            if not in_flight.isdisjoint(group):
                return self._after_group(at, in_flight, not finished.isdisjoint(group))
        crashes = 1 if finished else self.crashes + 1
        both = in_flight & set(self.in_flight) if crashes > 1 else in_flight
        rows = tuple(sorted(both or in_flight))
        if crashes < CRASHES_TO_SUSPECT:
            return replace(self, crashes=crashes, in_flight=rows)
        return replace(self, crashes=0, in_flight=(), groups=_halves(rows), deaths=0)

    def _after_group(self, at: int, in_flight: Set[int], progressed: bool) -> CrashHistory:
        """The history after a death while group ``at`` ran, those before it having finished."""
        group, later = self.groups[at], self.groups[at + 1 :]
        if progressed:
            return replace(self, groups=(group, *later), deaths=0)  # it gets on
        if len(group) > 1:
            ran = tuple(row for row in group if row in in_flight)
            did_not = tuple(row for row in group if row not in in_flight)
            rest = (did_not,) if did_not else ()
            return replace(self, groups=(*_halves(ran), *rest, *later), deaths=0)
        deaths = 1 + (self.deaths if at == 0 else 0)
        if deaths < DEATHS_TO_GIVE_UP:
            return replace(self, groups=(group, *later), deaths=deaths)
        given_up = tuple(sorted({*self.given_up, *group}))
        return replace(self, groups=later, deaths=0, given_up=given_up)

    def among(self, missing: Set[int]) -> CrashHistory:
        """The history without finished rows, which are above suspicion.

        Args:
            missing: those of its ``rows`` that are not finished.
        """
        groups = tuple(tuple(row for row in group if row in missing) for group in self.groups)
        left = tuple(group for group in groups if group)
        return replace(
            self,
            in_flight=tuple(row for row in self.in_flight if row in missing),
            groups=left,
            deaths=self.deaths if left[:1] == self.groups[:1] else 0,
            given_up=tuple(row for row in self.given_up if row in missing),
        )

    @property
    def is_held(self) -> bool:
        """Whether a death without progress is remembered: the next must tell which rows ran."""
        return self.crashes > 0 or bool(self.groups)

    @property
    def rows(self) -> set[int]:
        """All rows that were in flight, are suspected or given up."""
        return {*self.in_flight, *self.given_up, *(row for group in self.groups for row in group)}

    def to_json(self) -> bytes:
        """The history as it is stored."""
        return json.dumps(asdict(self)).encode()


_STORED = TypeAdapter(CrashHistory)


def crash_history_from(data: bytes) -> CrashHistory:
    """The stored history; an empty one where that is damaged."""
    try:
        return _STORED.validate_json(data)
    except ValueError:
        return CrashHistory()


def _halves(rows: Group) -> tuple[Group, ...]:
    middle = (len(rows) + 1) // 2
    return tuple(half for half in (rows[:middle], rows[middle:]) if half)


def attribute_crashes(out: OutputDir, missing: Sequence[range]) -> CrashHistory:
    """The history with the deaths of all earlier runs, each counted once.

    Args:
        missing: rows that are not finished, in order.

    Raises:
        StorageError: what was found cannot be read, written down or deleted.
    """
    crash_history = _stored_history(out)
    logs = out.files.entries(out.in_flight)
    for log in logs:
        if log.name != crash_history.last_run:  # else a run has died between these two writes
            given = _logged_rows(out, log)
            in_flight = within(given, missing)
            finished = np.setdiff1d(given, in_flight, assume_unique=True)
            crash_history = crash_history.after_death(
                log.name, set(in_flight.tolist()), set(finished.tolist())
            )
    unfinished = within(sorted_row_ids(crash_history.rows), missing)
    crash_history = crash_history.among(set(unfinished.tolist()))
    if logs:
        out.write(out.suspects, crash_history.to_json())
    for log in logs:
        with storage_errors(log, "delete"):
            out.files.delete(log)
    return crash_history


def clear_quarantine(out: OutputDir) -> None:
    """Let the rows that were given up run again.

    Raises:
        StorageError: that cannot be written down.
    """
    crash_history = _stored_history(out)
    if crash_history.given_up:
        out.write(out.suspects, replace(crash_history, given_up=()).to_json())


def _stored_history(out: OutputDir) -> CrashHistory:
    try:
        return crash_history_from(read_file(out.files, out.suspects))
    except OSError:
        return CrashHistory()


def _logged_rows(out: OutputDir, log: PurePath) -> RowIds:
    try:
        data = read_file(out.files, log)
    except OSError:
        return sorted_row_ids(())
    whole = len(data) - len(data) % LOG_ENTRY.itemsize  # the last write may have been cut short
    return _open_rows(np.frombuffer(data[:whole], dtype=LOG_ENTRY))


def _open_rows(entries: npt.NDArray[np.int64]) -> RowIds:
    """Rows whose last entry is their id, not its complement."""
    latest = entries[::-1]
    rows, last = np.unique(np.where(latest < 0, ~latest, latest), return_index=True)
    open_rows: RowIds = rows[latest[last] >= 0].astype(np.int64)
    return open_rows
