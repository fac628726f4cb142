"""Finds rows that kill the process, from logs of the rows in flight, and stops retrying them.

Each run logs its rows in flight (``run/in_flight_log.py``), and later runs read the log with this
module. The file ``_batchinfer/in_flight/<run id>`` consists of 8-byte entries: a row's id before
its prompt is built, the id's complement (``~id``) once the prompt is built, and the id again when
the engine gets the row. A run that ends normally deletes the file. The log is not synced to disk,
because it must survive the death of the process but not a crash of the machine. Entries reach an
object store only after seconds, which is too late if a row kills the process at once. After a run
has died, the next run therefore stores each row's id before the row runs.

A thousand innocent rows may be in flight when a process is killed. A death therefore creates no
suspects if the run has made progress, that is, if the run finished rows or stored tokens of
unfinished rows (``batchinfer.job.tokens``). Rows with long answers store tokens even if another row
kills every run, so tokens alone count as progress for at most ``MOST_FRUITLESS`` deaths. After a
death without progress, the suspects are the rows that were in flight at this death and at an
earlier death. Suspects run apart from all other rows: n suspects first run in about sqrt(n) groups
of about sqrt(n) rows, one group at a time. If the process dies while a group runs, each row of that
group then runs alone. A row is given up when the process has died twice while the row ran alone and
stored no tokens. A row that runs alone stores its tokens every second (``TokensInFlight``).
External kills therefore cannot cause a row to be given up if each run lives for a second after the
row's first token.

``_batchinfer/suspects.json`` stores the crash history for all writers, which change the file under
the directory's lock.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, NonNegativeInt, TypeAdapter

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.row_ranges import NO_ROWS, RowIds, sorted_row_ids
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors

MOST_FRUITLESS = 8
"""Number of deaths without a finished row after which stored tokens no longer count as progress. A
machine is unlikely to crash this often while it generates one answer."""

Group = tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
"""Row ids, sorted."""

LOG_ENTRY = np.dtype("<i8")
"""Type of an entry in a log of rows in flight."""


@dataclass(frozen=True)
class CrashHistory:
    """The deaths of runs, and the rows suspected of causing them."""

    __pydantic_config__: ClassVar = STRICT

    seen_once: Group = ()
    """Rows that were in flight when a run died, but that are not suspects yet."""
    groups: tuple[Group, ...] = ()
    """Groups of suspects. Each group runs alone in the engine, before all other rows."""
    died_alone: Group = ()
    """Suspects that were running alone when exactly one run died."""
    given_up: Group = ()
    """Rows that will not run again."""
    counted: tuple[str, ...] = ()
    """Ids of the runs that died together in the most recently counted death."""
    fruitless: NonNegativeInt = 0
    """Number of consecutive deaths without a finished row, whether or not tokens were stored. The
    count is not reset while there are suspects: otherwise, stored tokens would again count as
    progress and delay the decision about each group."""

    def after_death(
        self,
        runs: Sequence[str],
        in_flight: Set[int],
        finished: Set[int],
        *,
        kept_tokens: bool = False,
    ) -> CrashHistory:
        """Return the crash history after one more death.

        Args:
            runs: ids of the runs that died together.
            in_flight: unfinished rows in the engines of ``runs``.
            finished: rows in the logs of ``runs`` that are already on disk.
            kept_tokens: True if the runs stored tokens of unfinished rows, so that the next run
                resumes them.
        """
        if not in_flight:  # the runs died before or after they computed rows
            return replace(self, counted=tuple(runs))
        keeps_going = kept_tokens and self.fruitless < MOST_FRUITLESS
        has_progressed = bool(finished) or keeps_going
        after = self._after_groups(in_flight, finished, keeps_going, kept_tokens)
        if after is None:
            again = () if has_progressed else _sorted(in_flight & {*self.seen_once})
            once = {*self.seen_once, *in_flight} - {*again}
            groups = (*self.groups, *_split(again, math.isqrt(len(again))))
            after = replace(self, seen_once=_sorted(once), groups=groups)
        begins_again = bool(finished) and not self.groups
        fruitless = 0 if begins_again else self.fruitless + 1
        return replace(after, counted=tuple(runs), fruitless=fruitless)

    def _after_groups(
        self, in_flight: Set[int], finished: Set[int], keeps_going: bool, kept_tokens: bool
    ) -> CrashHistory | None:
        """Return the history after a death while suspects ran; None if no suspect ran."""
        after, has_run = self, False
        for group in self.groups:
            ran = _sorted(in_flight & {*group})
            if not ran:
                continue
            has_run = True
            # In a group of one row, stored tokens show that this row made progress. The retries
            # still end, because a row cannot store new tokens forever.
            has_tokens = kept_tokens if len(group) == 1 else keeps_going
            if has_tokens or not finished.isdisjoint(group):
                after = replace(after, died_alone=_without(after.died_alone, group))
            elif len(group) > 1:
                rest = _without(group, ran)
                split = (*_split(ran, 1), *([rest] if rest else []))
                after = replace(after, groups=(*split, *_others(after.groups, group)))
            elif group[0] in after.died_alone:
                after = replace(
                    after,
                    groups=_others(after.groups, group),
                    died_alone=_without(after.died_alone, group),
                    given_up=_sorted({*after.given_up, *group}),
                )
            else:
                after = replace(after, died_alone=_sorted({*after.died_alone, *group}))
        return after if has_run else None

    def among(self, missing: Set[int]) -> CrashHistory:
        """Return the history without rows that have finished, because they cannot be at fault.

        Args:
            missing: the unfinished rows among ``self.rows``.
        """

        def kept(rows: Group) -> Group:
            return tuple(row for row in rows if row in missing)

        once, groups = kept(self.seen_once), tuple(filter(None, map(kept, self.groups)))
        is_fruitless = bool(groups) or (bool(once) and once == self.seen_once)
        return replace(
            self,
            seen_once=once,
            groups=groups,
            died_alone=kept(self.died_alone),
            given_up=kept(self.given_up),
            fruitless=self.fruitless if is_fruitless else 0,
        )

    @property
    def is_held(self) -> bool:
        """True if a run died without progress. The next run must then log each row durably before
        the row runs, so that the log names the rows in flight if that run dies too."""
        return bool(self.seen_once or self.groups)

    @property
    def rows(self) -> RowIds:
        groups = (row for group in self.groups for row in group)
        return sorted_row_ids({*self.seen_once, *self.given_up, *groups})


_STORED = TypeAdapter(CrashHistory)


def crash_history_from(data: bytes) -> CrashHistory:
    """Parse a stored history; return an empty one if the data is damaged."""
    try:
        return _STORED.validate_json(data)
    except ValueError:
        return CrashHistory()


def stored_history(out: OutputDir) -> CrashHistory:
    try:
        return crash_history_from(read_file(out.files, out.suspects))
    except OSError:
        return CrashHistory()


def count_deaths(
    out: OutputDir, logs: Sequence[PurePath], unfinished: Callable[[RowIds], RowIds]
) -> CrashHistory:
    """Add the deaths of runs to the stored history, and return the new history.

    The caller holds the directory's lock. A run is counted only once. Logs that are found together
    count as one death, because writers on one machine die together.

    Args:
        logs: the logs of dead runs.
        unfinished: returns the unfinished rows among the given rows.
    """
    before = history = stored_history(out)
    # An earlier call may have counted a run and died before it deleted the log.
    new = [log for log in logs if log.name not in history.counted]
    if new:
        logged = np.unique(np.concatenate([NO_ROWS, *(logged_rows(out, log) for log in new)]))
        in_flight = unfinished(logged)
        finished = np.setdiff1d(logged, in_flight, assume_unique=True)
        tokens = [path.name for path in out.files.entries(out.tokens)]
        history = history.after_death(
            [log.name for log in new],
            set(in_flight.tolist()),
            set(finished.tolist()),
            kept_tokens=any(re.match(rf"{log.name}-\d", name) for log in new for name in tokens),
        )
    history = history.among(set(unfinished(history.rows).tolist()))
    if history != before:
        out.write(out.suspects, json.dumps(asdict(history)).encode())
    for log in logs:
        with storage_errors(log, "delete"):
            out.files.delete(log)
    return history


def forget_given_up(out: OutputDir) -> None:
    """Let rows that were given up run again. The caller holds the directory's lock."""
    history = stored_history(out)
    if history.given_up:
        out.write(out.suspects, json.dumps(asdict(replace(history, given_up=()))).encode())


def logged_rows(out: OutputDir, log: PurePath) -> RowIds:
    """Return the rows that a run's log lists as in flight, even if they have finished since. If
    there is no log, return no rows."""
    try:
        data = read_file(out.files, log)
    except OSError:
        return NO_ROWS
    whole = len(data) - len(data) % LOG_ENTRY.itemsize  # the last write may have been cut short
    latest = np.frombuffer(data[:whole], dtype=LOG_ENTRY)[::-1]
    rows, last = np.unique(np.where(latest < 0, ~latest, latest), return_index=True)
    in_flight: RowIds = rows[latest[last] >= 0].astype(np.int64)
    return in_flight


def _split(rows: Group, size: int) -> list[Group]:
    if not rows:
        return []
    count = len(rows) // max(1, size)
    bounds = [len(rows) * at // count for at in range(count + 1)]
    return [rows[first:stop] for first, stop in pairwise(bounds)]


def _sorted(rows: Set[int]) -> Group:
    return tuple(sorted(rows))


def _others(groups: Sequence[Group], group: Group) -> tuple[Group, ...]:
    return tuple(other for other in groups if other != group)


def _without(rows: Group, dropped: Group) -> Group:
    return tuple(row for row in rows if row not in {*dropped})
