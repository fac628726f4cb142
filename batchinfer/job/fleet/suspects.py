"""The rows that a fleet's workers may have died of, which run apart from all others.

Every row in flight when a worker dies may be what it died of, but for those that it has kept tokens
of (``batchinfer.job.tokens``): if one of them kills, whoever has it next begins nearer to where it
does, until nothing is kept. A row that two deaths have in common is a suspect: suspects run apart,
by halves, each half alone on one worker while the others go on (``output/recovery/quarantine.py``,
whose histories these are). A row is given up when two workers have died while it ran alone and kept
none of its tokens, and another row was finished since the first of them: where nothing is finished,
the machine is at fault, and the job ends before rows are given up for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from batchinfer.job.fleet.leases import LeaseLedger
from batchinfer.job.output.recovery.quarantine import DEATHS_TO_GIVE_UP, CrashHistory, Group
from batchinfer.job.row_ids import RowIds, sorted_row_ids


@dataclass(eq=False)
class Case:
    """Suspects of some deaths, which run apart."""

    history: CrashHistory
    worker: str | None = None
    """Who runs, or is to run, the first group."""
    fence: int | None = None
    patience: int = 0
    """Deaths that it may take to find one of its rows by halving."""

    @staticmethod
    def of(groups: tuple[Group, ...], deaths: int = 0) -> Case:
        """A case of rows that have not run alone yet; ``deaths`` is of the first group."""
        rows = sum(map(len, groups))
        patience = 2 * DEATHS_TO_GIVE_UP + rows.bit_length()
        return Case(CrashHistory(groups=groups, deaths=deaths), patience=patience)

    @property
    def rows(self) -> RowIds:
        """Rows of its first group."""
        return sorted_row_ids(self.history.groups[0])


class Suspects:
    """What the workers of one ledger have died of.

    ``given_up`` are rows that will not run again.
    """

    def __init__(self, ledger: LeaseLedger) -> None:
        self.given_up: set[int] = set()
        self._ledger = ledger
        self._cases: deque[Case] = deque()
        self._marked: set[int] = set()
        """Rows in flight at one death, without tokens."""
        self._progress = 0
        """Counts up whenever a row was finished."""
        self._alone: dict[int, tuple[int, int]] = {}
        """Rows that ran alone when workers died: how many, and the progress until the first."""

    @property
    def patience(self) -> int:
        """Deaths that it may take to find the rows that are looked for."""
        return sum(case.patience for case in self._cases)

    def case_of(self, worker: str) -> Case | None:
        """The case that a worker is kept for."""
        return next((case for case in self._cases if case.worker == worker), None)

    def with_worker(self) -> list[Case]:
        """Cases that a worker is kept for."""
        return [case for case in self._cases if case.worker is not None]

    def without_worker(self) -> Iterator[Case]:
        """Cases that a worker is to be kept for; not those for which other rows have to tell first
        that the machine is not at fault."""
        for case in self._cases:
            group = case.history.groups[0]
            if case.worker is None and not (len(group) == 1 and self._may_be_of_machine(group[0])):
                yield case

    def adopt(self, history: CrashHistory) -> None:
        """Go on from what earlier runs have died of."""
        self.given_up.update(history.given_up)
        suspects = sorted_row_ids(row for group in history.groups for row in group)
        if len(suspects):
            self._ledger.set_aside(suspects)
            self._cases.append(Case.of(history.groups, history.deaths))
        if history.groups and history.deaths:
            self._alone[history.groups[0][0]] = (history.deaths, self._progress)
        if history.crashes:
            self._marked.update(history.in_flight)

    @property
    def history(self) -> CrashHistory:
        """What workers have died of, for a run that goes on from here."""
        # It has one number of deaths, that of the first group.
        cases = sorted((case.history for case in self._cases), key=lambda found: -found.deaths)
        return CrashHistory(
            crashes=int(bool(self._marked)),
            in_flight=tuple(sorted(self._marked)),
            groups=tuple(group for history in cases for group in history.groups),
            deaths=cases[0].deaths if cases else 0,
            given_up=tuple(sorted(self.given_up)),
        )

    def note_progress(self) -> None:
        """A row was finished."""
        self._progress += 1

    def ended(self, fence: int) -> None:
        """A lease has ended in order: those of its rows that were suspects are none."""
        for case in list(self._cases):
            if case.fence == fence:
                later = case.history.groups[1:]
                self._next_group(case, replace(case.history, groups=later, deaths=0))

    def died(self, worker: str, in_flight: RowIds, finished: RowIds, with_tokens: RowIds) -> None:
        """A worker is gone; as ``Dispatcher.died`` has it."""
        case = self.case_of(worker)
        if case is not None:
            case.worker = None
        if case is not None and case.fence is not None:
            self._blame(case, in_flight, finished, with_tokens)
        else:
            got_on = {*with_tokens.tolist()}
            self._marked -= got_on
            self._suspect({*in_flight.tolist()} - got_on)

    def _suspect(self, in_flight: set[int]) -> None:
        suspects = in_flight & self._marked
        self._marked ^= in_flight  # a suspect's deaths are counted by its case from now on
        if not suspects:
            return
        rows = tuple(sorted(suspects))
        history = CrashHistory(crashes=1, in_flight=rows).after_death("", suspects, set())
        self._ledger.set_aside(sorted_row_ids(suspects))
        self._cases.append(Case.of(history.groups))

    def _blame(self, case: Case, in_flight: RowIds, finished: RowIds, with_tokens: RowIds) -> None:
        """Count a death while a group of suspects ran alone.

        A single row that has kept tokens gets on: those it can keep come to an end. Those of a
        group may be of one row, and another what its workers die of.
        """
        left = {row for group in case.history.groups for row in group} - {*finished.tolist()}
        self._ledger.set_aside(sorted_row_ids(left & {*case.history.groups[0]}))
        is_single = len(case.history.groups[0]) == 1
        gets_on = is_single and case.history.groups[0][0] in with_tokens
        if gets_on:
            self._alone.pop(case.history.groups[0][0], None)
        if is_single and len(in_flight) and not (gets_on or len(finished)):
            history = self._after_death_alone(case)
        else:
            history = case.history.after_death(
                "", {*in_flight.tolist()}, {*finished.tolist()}, kept_tokens=gets_on
            ).among(left)
        self._next_group(case, history)

    def _after_death_alone(self, case: Case) -> CrashHistory:
        """A case's history after a death while a single row ran, which may be what it died of."""
        row, *_ = case.history.groups[0]
        deaths, progress_before = self._alone.get(row, (0, self._progress))
        self._alone[row] = (deaths + 1, progress_before)
        if deaths + 1 < DEATHS_TO_GIVE_UP:
            return replace(case.history, deaths=deaths + 1)
        later = case.history.groups[1:]
        if self._may_be_of_machine(row):
            self._cases.append(Case(CrashHistory(groups=((row,),), deaths=deaths + 1)))
            return replace(case.history, groups=later, deaths=0)
        self.given_up.add(row)
        self._ledger.take_back_aside(sorted_row_ids([row]))
        return replace(case.history, groups=later, deaths=0)

    def _may_be_of_machine(self, row: int) -> bool:
        """Whether deaths while a row ran alone may be the machine's fault: no row was finished
        since, and there are others that can tell."""
        deaths, progress_before = self._alone.get(row, (0, self._progress))
        return (
            deaths >= DEATHS_TO_GIVE_UP
            and self._progress == progress_before
            and self._are_others_left()
        )

    def _are_others_left(self) -> bool:
        """Whether rows are left that are not known to have killed workers alone."""
        apart = {case.fence for case in self._cases}
        return (
            self._ledger.rows_unleased > 0
            or bool(self._ledger.fences - apart)
            or any(
                self._alone.get(row, (0, 0))[0] < DEATHS_TO_GIVE_UP
                for case in self._cases
                for group in case.history.groups
                for row in group
            )
        )

    def _next_group(self, case: Case, history: CrashHistory) -> None:
        """Go on with a case; its worker is kept for it, if it lives."""
        case.history = CrashHistory(groups=history.groups, deaths=history.deaths)
        case.fence = None
        if not history.groups:
            self._cases.remove(case)
