"""Which row makes the process die: found by running fewer and fewer of those it died on.

A thousand innocent rows are in flight whenever a process is killed. So a death means nothing as
long as rows finish between one and the next. Two deaths without that make the rows in flight at
both suspects. Suspects run by halves with nothing beside them; a half that dies is halved again.
A row is given up only when the process has died twice while it ran alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass, replace

import numpy as np

from batchinfer.job.storage.stored_json import parse

CRASHES_TO_SUSPECT = 2
DEATHS_TO_GIVE_UP = 2

Group = tuple[int, ...]


@dataclass(frozen=True)
class Suspicion:
    """What the deaths of earlier runs say about rows that are not finished."""

    crashes: int = 0
    """Deaths in a row without a row finished in between."""
    in_flight: Group = ()
    """Rows that were in flight at each of them."""
    groups: tuple[Group, ...] = ()
    """Suspects: each group runs with nothing beside it, in this order, before all other rows."""
    deaths: int = 0
    """How often the process died while the first group, a single row, ran."""
    given_up: Group = ()
    """Rows that will not run again."""
    last_run: str = ""
    """The last run whose death it knows of."""

    def after_death(self, run_id: str, in_flight: Set[int], finished: Set[int]) -> Suspicion:
        """What the death of a run adds to it.

        Args:
            run_id: the run.
            in_flight: rows the engine had been given that are not finished.
            finished: rows the engine had been given that are finished, and on disk.
        """
        return replace(self._after(in_flight, finished), last_run=run_id)

    def _after(self, in_flight: Set[int], finished: Set[int]) -> Suspicion:
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

    def _after_group(self, at: int, in_flight: Set[int], progressed: bool) -> Suspicion:
        """The process died while group ``at`` ran; those before it had finished."""
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

    def among(self, missing: Set[int]) -> Suspicion:
        """What is left of it: finished rows are above suspicion.

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
        """All rows it names."""
        return {*self.in_flight, *self.given_up, *(row for group in self.groups for row in group)}

    def to_json(self) -> bytes:
        """As it is stored."""
        return json.dumps(asdict(self)).encode()


def suspicion_from(data: bytes) -> Suspicion:
    """What ``to_json`` made; no suspicion where that is damaged."""
    try:
        fields = parse(data)
        for name in ("in_flight", "given_up"):
            fields[name] = _group(fields[name])
        fields["groups"] = tuple(map(_group, fields["groups"]))
        for name in ("crashes", "deaths"):
            fields[name] = int(fields[name])
        return Suspicion(**fields)
    except (ValueError, TypeError, KeyError, OverflowError):
        return Suspicion()


def _group(rows: Iterable[object]) -> Group:
    """Row ids as they were stored."""
    return tuple(np.array(list(rows), dtype=np.int64).tolist())


def _halves(rows: Group) -> tuple[Group, ...]:
    middle = (len(rows) + 1) // 2
    return tuple(half for half in (rows[:middle], rows[middle:]) if half)
