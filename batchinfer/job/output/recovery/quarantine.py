"""Quarantine of rows that make the process die: rows in flight, suspects, rows given up.

The log that a run keeps of its rows in flight is ``run/in_flight_log.py``. Here it is read.
``_batchinfer/in_flight/<run id>`` holds row ids, 8 bytes each: a row's when its prompt is about to
be made, its complement (``~id``) when that is made, its id again when it is handed to the engine.
A run that ends in order deletes the file. It is not synced: what matters is that the process dies,
and what it has written outlives that. In a store it does so some seconds later only, too late for
a row that kills at once: after a death the next run has each row there before it runs.

A thousand innocent rows are in flight whenever a process is killed. So a death means nothing as
long as rows finish between one and the next, or their tokens go to disk
(``batchinfer.job.tokens``), which a row that kills beside long answers does not keep these from: so
tokens alone count for ``MOST_FRUITLESS`` deaths. Two deaths without that make the rows in flight at
both suspects. Suspects run by halves with nothing beside them; a half that dies is halved again.
A row is given up only when the process has died twice while it ran alone and kept none of its
tokens. A row that runs alone keeps them every second (``TokensInFlight``): it is not given up for
kills from outside where each run lives that long after its first token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, TypeAdapter

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.row_ids import RowIds, in_range, sorted_row_ids, within
from batchinfer.job.run_ids import writer_of
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors

CRASHES_TO_SUSPECT = 2
DEATHS_TO_GIVE_UP = 2
MOST_FRUITLESS = 8
"""Deaths between which no row finishes, before tokens alone are no sign any more that rows get on;
an answer takes minutes, or some hours, of which machines are lost less often."""

Group = tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
"""Row ids."""

_SUSPECTS = re.compile(r"suspects(-[a-z]\w*)?\.json")

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
    """The runs, with spaces between them, whose deaths were counted last."""
    fruitless: NonNegativeInt = 0
    """Deaths in a row without a row finished in between, whatever tokens were kept; while there are
    suspects it does not go down, or each half would have to wait anew."""

    def after_death(
        self, run_id: str, in_flight: Set[int], finished: Set[int], *, kept_tokens: bool = False
    ) -> CrashHistory:
        """The history with the death of one more run.

        Args:
            in_flight: rows the engine had been given that are not finished.
            finished: rows the engine had been given that are finished, and on disk.
            kept_tokens: whether the run has put tokens of unfinished rows on disk: then it got on,
                as long answers do for hours, and the next run goes on from there.
        """
        after = self._after(in_flight, finished, kept_tokens=kept_tokens)
        begins_anew = bool(finished) and not self.groups
        fruitless = 0 if begins_anew else self.fruitless + bool(in_flight)
        return replace(after, last_run=run_id, fruitless=fruitless)

    def _after(self, in_flight: Set[int], finished: Set[int], *, kept_tokens: bool) -> CrashHistory:
        if not in_flight:  # it died before or after its work
            return self
        gets_on = kept_tokens and self.fruitless < MOST_FRUITLESS
        for at, group in enumerate(self.groups):
            if not in_flight.isdisjoint(group):
                # The tokens of a single row are its own: those it can keep come to an end.
                has_tokens = kept_tokens if len(group) == 1 else gets_on
                progressed = has_tokens or not finished.isdisjoint(group)
                return self._after_group(at, in_flight, progressed)
        crashes = 1 if finished or gets_on else self.crashes + 1
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
        in_flight = tuple(row for row in self.in_flight if row in missing)
        is_fruitless = bool(left) or (bool(in_flight) and in_flight == self.in_flight)
        return replace(
            self,
            crashes=self.crashes if in_flight else 0,
            in_flight=in_flight,
            groups=left,
            deaths=self.deaths if left[:1] == self.groups[:1] else 0,
            given_up=tuple(row for row in self.given_up if row in missing),
            fruitless=self.fruitless if is_fruitless else 0,
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

    Logs that are found together tell of one death: writers beside each other die together, with
    their machine. One of several writers that has no history yet takes up what all others have
    left, as far as it is about its rows. Who writes alone takes up everything.

    Args:
        missing: rows that are not finished, in order; of several writers: that this one makes.

    Raises:
        StorageError: what was found cannot be read, written down or deleted.
    """
    files, logs = _left_to(out)
    histories = {path: _stored_history(out, path) for path in files}
    crash_history = _merged(
        [
            history
            for path, history in histories.items()
            if _is_own(out, path) or len(within(sorted_row_ids(history.rows), missing))
        ]
    )
    counted = crash_history.last_run.split()
    new = [log for log in logs if log.name not in counted]  # else it died between these two writes
    if new:
        given = np.unique(np.concatenate([_own_rows(out, log, missing) for log in new]))
        in_flight = within(given, missing)
        finished = np.setdiff1d(given, in_flight, assume_unique=True)
        tokens = [path.name for path in out.files.entries(out.tokens)]
        crash_history = crash_history.after_death(
            " ".join(log.name for log in new),
            set(in_flight.tolist()),
            set(finished.tolist()),
            kept_tokens=any(re.match(rf"{log.name}-\d", name) for log in new for name in tokens),
        )
    unfinished = within(sorted_row_ids(crash_history.rows), missing)
    crash_history = crash_history.among(set(unfinished.tolist()))
    if logs or files not in ([], [out.suspects]):
        out.write(out.suspects, crash_history.to_json())
    for path in (*logs, *files):
        if path != out.suspects and _is_own(out, path):
            with storage_errors(path, "delete"):
                out.files.delete(path)
    return crash_history


def clear_quarantine(out: OutputDir) -> None:
    """Let the rows that were given up run again.

    Raises:
        StorageError: that cannot be written down.
    """
    for path in _suspects_files(out):
        crash_history = _stored_history(out, path)
        if crash_history.given_up:
            out.write(path, replace(crash_history, given_up=()).to_json())


def _left_to(out: OutputDir) -> tuple[list[PurePath], list[PurePath]]:
    """Files of histories and logs that ``out.writer`` goes on from: its own, where it has any."""
    files, logs = _suspects_files(out), list(out.files.entries(out.in_flight))
    if out.suspects not in files:
        return files, logs
    if out.writer:
        return [out.suspects], [log for log in logs if _is_own(out, log)]
    # Those of several writers have taken up what was known before, and know more.
    return [*(path for path in files if path != out.suspects), out.suspects], logs


def _suspects_files(out: OutputDir) -> list[PurePath]:
    return [path for path in out.files.entries(out.state) if _SUSPECTS.fullmatch(path.name)]


def _is_own(out: OutputDir, path: PurePath) -> bool:
    """Whether nobody else goes on from a log or from a file of a history."""
    return not out.writer or path == out.suspects or writer_of(path.name) == out.writer


def _merged(histories: Sequence[CrashHistory]) -> CrashHistory:
    """Several histories as one; where two have a row, the first counts."""
    if len(histories) == 1:
        return histories[0]
    known = {row for history in histories for row in history.given_up}
    given_up, groups = tuple(sorted(known)), list[Group]()
    deaths = {
        history.groups[0]: history.deaths for history in reversed(histories) if history.groups
    }
    for group in (group for history in histories for group in history.groups):
        groups.append(tuple(row for row in group if row not in known))
        known.update(group)
    groups = [group for group in groups if group]
    return CrashHistory(
        crashes=max((history.crashes for history in histories), default=0),
        in_flight=tuple(sorted({row for history in histories for row in history.in_flight})),
        groups=tuple(groups),
        deaths=deaths.get(groups[0], 0) if groups else 0,
        given_up=given_up,
        last_run=" ".join(filter(None, (history.last_run for history in histories))),
        fruitless=max((history.fruitless for history in histories), default=0),
    )


def _stored_history(out: OutputDir, path: PurePath) -> CrashHistory:
    try:
        return crash_history_from(read_file(out.files, path))
    except OSError:
        return CrashHistory()


def _own_rows(out: OutputDir, log: PurePath, missing: Sequence[range]) -> RowIds:
    """Rows of a log; of another writer's, those among which rows are missing: others may be its."""
    row_ids = logged_rows(out, log)
    if _is_own(out, log) or not missing:
        return row_ids
    return in_range(row_ids, range(missing[0].start, missing[-1].stop))


def logged_rows(out: OutputDir, log: PurePath) -> RowIds:
    """Rows that a run's log says were in flight, finished or not; none where there is no log."""
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
