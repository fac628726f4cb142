"""Rows that make the process die: found by the logs of rows in flight, and given up at last.

The log that a run keeps is ``run/in_flight_log.py``; here it is read. ``_batchinfer/in_flight/<run
id>`` holds row ids, 8 bytes each: a row's when its prompt is about to be made, its complement
(``~id``) when that is made, its id again when it is handed to the engine. A run that ends in order
deletes the file. It is not synced: what matters is that the process dies, and what it has written
outlives that. In a store it does so some seconds later only, too late for a row that kills at once:
after a death the next run has each row there before it runs.

A thousand innocent rows are in flight whenever a process is killed. So a death means nothing where
its run has finished rows, or has put tokens of unfinished rows on disk (``batchinfer.job.tokens``):
a row that kills beside long answers does not keep these from that, so tokens alone count for
``MOST_FRUITLESS`` deaths. Rows that were in flight at two deaths without such progress are
suspects. They run with nothing else in the engine, first in about sqrt(n) groups of about sqrt(n)
rows; the rows of a group that dies run alone. A row is given up when the process has died twice
while it ran alone and kept none of its tokens. A row that runs alone keeps them every second
(``TokensInFlight``): it is not given up for kills from outside where each run lives that long after
its first token.

``_batchinfer/suspects.json`` has what is known, for all writers; it is changed under the
directory's lock alone.
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
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, TypeAdapter

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.row_ids import NO_ROWS, RowIds, sorted_row_ids
from batchinfer.job.storage.filesystem import STRICT, read_file, storage_errors

MOST_FRUITLESS = 8
"""Deaths between which no row finishes, before tokens alone are no progress any more; an answer
takes minutes, or some hours, in which machines are lost less often."""

Group = tuple[Annotated[int, Field(ge=0, lt=2**63)], ...]
"""Row ids, sorted."""

LOG_ENTRY = np.dtype("<i8")
"""Entry of a log of rows in flight."""


@dataclass(frozen=True)
class CrashHistory:
    """Deaths of runs, and the rows suspected of them."""

    __pydantic_config__: ClassVar = STRICT

    seen_once: Group = ()
    """Rows that were in flight at a death, and not at a second one without progress."""
    groups: tuple[Group, ...] = ()
    """Suspects: each group runs with nothing else in the engine, before all other rows."""
    died_alone: Group = ()
    """Suspects that the process died with once while they ran alone."""
    given_up: Group = ()
    """Rows that will not run again."""
    counted: tuple[str, ...] = ()
    """The runs whose deaths were counted last."""
    fruitless: NonNegativeInt = 0
    """Deaths in a row without a row finished in between, whatever tokens were kept; while there are
    suspects it does not go down, or each group would wait again."""

    def after_death(
        self,
        runs: Sequence[str],
        in_flight: Set[int],
        finished: Set[int],
        *,
        kept_tokens: bool = False,
    ) -> CrashHistory:
        """The history with one more death.

        Args:
            runs: that died, together.
            in_flight: rows their engines had been given that are not finished.
            finished: rows their engines had been given that are finished, and on disk.
            kept_tokens: whether they have put tokens of unfinished rows on disk: the next run goes
                on from there.
        """
        if not in_flight:  # they died before or after their work
            return replace(self, counted=tuple(runs))
        gets_on = kept_tokens and self.fruitless < MOST_FRUITLESS
        has_progressed = bool(finished) or gets_on
        after = self._after_groups(in_flight, finished, gets_on, kept_tokens)
        if after is None:
            again = () if has_progressed else _sorted(in_flight & {*self.seen_once})
            once = {*self.seen_once, *in_flight} - {*again}
            groups = (*self.groups, *_split(again, math.isqrt(len(again))))
            after = replace(self, seen_once=_sorted(once), groups=groups)
        begins_again = bool(finished) and not self.groups
        fruitless = 0 if begins_again else self.fruitless + 1
        return replace(after, counted=tuple(runs), fruitless=fruitless)

    def _after_groups(
        self, in_flight: Set[int], finished: Set[int], gets_on: bool, kept_tokens: bool
    ) -> CrashHistory | None:
        """The history after a death while suspects ran; None: none of them did."""
        after, has_run = self, False
        for group in self.groups:
            ran = _sorted(in_flight & {*group})
            if not ran:
                continue
            has_run = True
            # The tokens of a single row are its own: those it can keep come to an end.
            has_tokens = kept_tokens if len(group) == 1 else gets_on
            if has_tokens or not finished.isdisjoint(group):
                after = replace(after, died_alone=_without(after.died_alone, group))
            elif len(group) > 1:
                others = [one for one in after.groups if one != group]
                rest = _without(group, ran)
                groups = (*_split(ran, 1), *([rest] if rest else []), *others)
                after = replace(after, groups=groups)
            elif group[0] in after.died_alone:
                after = replace(
                    after,
                    groups=tuple(one for one in after.groups if one != group),
                    died_alone=_without(after.died_alone, group),
                    given_up=_sorted({*after.given_up, *group}),
                )
            else:
                after = replace(after, died_alone=_sorted({*after.died_alone, *group}))
        return after if has_run else None

    def among(self, missing: Set[int]) -> CrashHistory:
        """The history of some rows alone: finished ones are above suspicion.

        Args:
            missing: those of its ``rows`` that are not finished.
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
        """Whether a death without progress is remembered: the next must tell which rows ran."""
        return bool(self.seen_once or self.groups)

    @property
    def rows(self) -> RowIds:
        """All rows that it knows."""
        groups = (row for group in self.groups for row in group)
        return sorted_row_ids({*self.seen_once, *self.given_up, *groups})


_STORED = TypeAdapter(CrashHistory)


def crash_history_from(data: bytes) -> CrashHistory:
    """The stored history; an empty one where that is damaged."""
    try:
        return _STORED.validate_json(data)
    except ValueError:
        return CrashHistory()


def stored_history(out: OutputDir) -> CrashHistory:
    """What is known of earlier deaths."""
    try:
        return crash_history_from(read_file(out.files, out.suspects))
    except OSError:
        return CrashHistory()


def count_deaths(
    out: OutputDir, logs: Sequence[PurePath], unfinished: Callable[[RowIds], RowIds]
) -> CrashHistory:
    """The history with the deaths of runs, each counted once; call it under the directory's lock.

    Logs that are found together tell of one death: writers beside each other die together, with
    their machine.

    Args:
        logs: of runs that have died.
        unfinished: gives those of some rows that are not finished.

    Raises:
        StorageError: what was found cannot be read, written down or deleted.
    """
    before = history = stored_history(out)
    new = [log for log in logs if log.name not in history.counted]  # else the last look was cut off
    if new:
        given = np.unique(np.concatenate([NO_ROWS, *(logged_rows(out, log) for log in new)]))
        in_flight = unfinished(given)
        finished = np.setdiff1d(given, in_flight, assume_unique=True)
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
    """Let the rows that were given up run again; call it under the directory's lock.

    Raises:
        StorageError: that cannot be written down.
    """
    history = stored_history(out)
    if history.given_up:
        out.write(out.suspects, json.dumps(asdict(replace(history, given_up=()))).encode())


def logged_rows(out: OutputDir, log: PurePath) -> RowIds:
    """Rows that a run's log says were in flight, finished or not; none where there is no log."""
    try:
        data = read_file(out.files, log)
    except OSError:
        return NO_ROWS
    whole = len(data) - len(data) % LOG_ENTRY.itemsize  # the last write may have been cut short
    return _open_rows(np.frombuffer(data[:whole], dtype=LOG_ENTRY))


def _open_rows(entries: npt.NDArray[np.int64]) -> RowIds:
    """Rows whose last entry is their id, not its complement."""
    latest = entries[::-1]
    rows, last = np.unique(np.where(latest < 0, ~latest, latest), return_index=True)
    open_rows: RowIds = rows[latest[last] >= 0].astype(np.int64)
    return open_rows


def _split(rows: Group, size: int) -> list[Group]:
    """Rows in groups of at least ``size``, as even as can be."""
    if not rows:
        return []
    count = len(rows) // max(1, size)
    bounds = [len(rows) * at // count for at in range(count + 1)]
    return [rows[first:stop] for first, stop in pairwise(bounds)]


def _sorted(rows: Set[int]) -> Group:
    return tuple(sorted(rows))


def _without(rows: Group, others: Group) -> Group:
    out = {*others}
    return tuple(row for row in rows if row not in out)
