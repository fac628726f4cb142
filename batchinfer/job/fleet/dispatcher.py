"""The decisions of a fleet's driver: who gets which rows, who gives some back, who is dead.

It has no clock, no processes and no files: it is told what happened and when, and says what to do.

Every row in flight when a worker dies may be what it died of. A row that two deaths have in common
is a suspect: suspects run apart, by halves, each half alone on one worker while the others go on
(``output/quarantine.py``, whose histories these are). A row is given up when two workers have died
while it ran alone, and another row was finished since the first of them: where nothing is finished,
the machine is at fault, and the job ends before rows are given up for that. A worker that is killed
because it told nothing has died of no row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest

from batchinfer.errors import DeviceError
from batchinfer.job.fleet.leases import Lease, LeaseLedger
from batchinfer.job.output.quarantine import DEATHS_TO_GIVE_UP, CrashHistory, Group
from batchinfer.job.row_ids import NO_ROWS, RowIds, sorted_row_ids

SILENT_S = 15.0
"""A worker that has told nothing for so long is killed, three reports are missing; unless it was
seen to compute meanwhile."""
LOOK_S = 10.0
"""A worker that has told nothing for so long is looked at."""
BUSY_S = 300.0
"""A worker that computes and tells nothing for so long is killed all the same: a call into C code
that lets nobody else run, over one huge row, is over by then."""
_LOOK_EVERY_S = 1.0
"""The silent are looked for so often."""
FRUITLESS_DEATHS = 4
"""For each worker, deaths with no row finished by anybody in between: then the job is ended."""


@dataclass(frozen=True)
class Give:
    """Hand a lease to its worker."""

    lease: Lease
    given_up: RowIds
    """Rows of it that are not to run: they have killed workers."""


@dataclass(frozen=True)
class TakeBack:
    """Ask a worker for rows that its engine has not got yet."""

    worker: str
    everything: bool
    """Else half of them."""


@dataclass(frozen=True)
class Look:
    """Find out whether a worker's process computes."""

    worker: str


@dataclass(frozen=True)
class Kill:
    """End a worker's process, whatever it is at."""

    worker: str
    reason: str


Action = Give | TakeBack | Look | Kill


@dataclass(eq=False)
class _Case:
    """Suspects of some deaths, which run apart."""

    history: CrashHistory
    worker: str | None = None
    """Who runs, or is to run, the first group."""
    fence: int | None = None
    patience: int = 0
    """Deaths that it may take to find one of its rows by halving."""

    @staticmethod
    def of(groups: tuple[Group, ...], deaths: int = 0) -> _Case:
        rows = sum(map(len, groups))
        patience = 2 * DEATHS_TO_GIVE_UP + rows.bit_length()
        return _Case(CrashHistory(groups=groups, deaths=deaths), patience=patience)


@dataclass
class _Worker:
    ready_at: float
    heard_at: float
    busy_at: float
    """When it was seen to compute, or heard of, last."""
    is_looked_at: bool = False
    """Whether it has been looked at since, and has not been seen to compute."""
    is_fenced: bool = False
    """Whether it is killed because it told nothing."""
    num_unadmitted: int = 0
    rows_done: int = 0
    latest_fence: int = 0
    is_asked: bool = False
    """Whether it has been asked for rows and has not answered."""
    case: _Case | None = None

    def seconds_left(self, now: float) -> float:
        """How long it will take until its engine has got all of its rows, if it goes on so."""
        return self.num_unadmitted * (now - self.ready_at) / max(1, self.rows_done)


@dataclass
class Dispatcher:
    """Deals a ledger's rows to workers that come and go."""

    ledger: LeaseLedger
    given_up: set[int] = field(default_factory=set)
    """Rows that will not run again."""

    def __post_init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._cases: deque[_Case] = deque()
        self._marked: set[int] = set()
        """Rows in flight at one death."""
        self._fruitless = 0
        self._progress = 0
        """Counts up whenever a row was finished."""
        self._alone: dict[int, tuple[int, int]] = {}
        """Rows that ran alone when workers died: how many, and the progress until the first."""
        self._with_room: dict[str, None] = {}
        """Workers that may have fewer leases than they can, in order: of a thousand, a few."""
        self._looked_at = -math.inf
        """When the silent were looked for."""

    @property
    def workers(self) -> list[str]:
        """Who is up."""
        return list(self._workers)

    def adopt(self, history: CrashHistory) -> None:
        """Go on from what earlier runs have died of."""
        self.given_up.update(history.given_up)
        suspects = sorted_row_ids(row for group in history.groups for row in group)
        if len(suspects):
            self.ledger.set_aside(suspects)
            self._cases.append(_Case.of(history.groups, history.deaths))
        if history.deaths:
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

    def ready(self, worker: str, now: float) -> None:
        """A worker has loaded its model."""
        self._workers[worker] = _Worker(now, now, now)
        self._with_room[worker] = None

    def reported(
        self, worker: str, now: float, num_unadmitted: int, rows_done: int, latest_fence: int
    ) -> None:
        """A worker lives.

        Args:
            num_unadmitted: rows of its leases that its engine has not got yet.
            rows_done: rows it has finished since it was ready.
            latest_fence: the last lease that it knew of.
        """
        state = self._workers.get(worker)
        if state is None:
            return
        if rows_done > state.rows_done:
            self._note_progress()
        state.heard_at = state.busy_at = now
        state.is_looked_at = False
        state.rows_done = rows_done
        if latest_fence == state.latest_fence:  # else rows are on the way to it
            state.num_unadmitted = num_unadmitted

    def seen(self, worker: str, now: float, *, is_busy: bool) -> None:
        """What ``Look`` has found."""
        state = self._workers.get(worker)
        if state is not None and is_busy:
            state.busy_at, state.is_looked_at = now, False

    def gave_back(self, worker: str, rows: Sequence[tuple[int, RowIds]]) -> None:
        """A worker's answer to ``TakeBack``: rows it will not run, by fence; perhaps none."""
        state = self._workers.get(worker)
        if state is None:
            return
        state.is_asked = False
        for fence, row_ids in rows:
            self.ledger.give_back(fence, row_ids)
            state.num_unadmitted = max(0, state.num_unadmitted - len(row_ids))
        if not rows:
            state.num_unadmitted = 0  # until it says otherwise

    def ended(self, worker: str, fence: int) -> None:
        """A worker has finished a lease, its rows are on disk, its drafts are handed over."""
        if not self.ledger.end(fence):
            return
        if worker in self._workers:
            self._with_room[worker] = None
        for case in list(self._cases):
            if case.fence == fence:
                self._next_group(
                    case, replace(case.history, groups=case.history.groups[1:], deaths=0)
                )

    def died(self, worker: str, in_flight: RowIds, finished: RowIds) -> None:
        """A worker is gone.

        Args:
            in_flight: rows of its leases that it ran, or made ready to, and that are not finished;
                none, where it cannot have died of one.
            finished: rows of its leases that are on disk.

        Raises:
            DeviceError: workers die one after another, and nothing is done.
        """
        state = self._workers.pop(worker, None)
        self._with_room.pop(worker, None)
        for lease in self.ledger.leases_of(worker):
            self.ledger.revoke(lease.fence, finished)
        if state is None:
            return
        if len(finished):
            self._note_progress()
        else:
            self._fruitless += 1
        if state.is_fenced:
            in_flight = NO_ROWS
        case = state.case
        if case is not None and case.fence is not None:
            self._blame(case, worker, in_flight, finished)
        else:
            if case is not None:
                case.worker = None
            self._suspect({*in_flight.tolist()})
        self._check_fruitless()

    def _check_fruitless(self) -> None:
        most = FRUITLESS_DEATHS * (1 + len(self._workers))
        if self._fruitless > most + sum(case.patience for case in self._cases):
            raise DeviceError(
                f"workers die one after another: {self._fruitless} without a finished row",
                hint="the logs in _batchinfer/logs say more",
            )

    def _note_progress(self) -> None:
        self._progress += 1
        self._fruitless = 0

    def actions(self, now: float) -> Iterator[Action]:
        """What to do next; each is done before the following is asked for."""
        yield from self._check_silent(now)
        self._reserve()
        for case in list(self._cases):
            if case.worker is not None:
                yield from self._run_apart(case.worker, self._workers[case.worker], case)
        if self.ledger.is_blocked:
            return
        if self.ledger.has_free:
            yield from self._grants()
        if not self.ledger.has_free:
            yield from self._take_back(now)

    def _grants(self) -> Iterator[Give]:
        for worker in list(self._with_room):
            state = self._workers[worker]
            if state.case is None:
                while (lease := self.ledger.grant(worker, len(self._workers))) is not None:
                    yield self._give(lease, state)
            if not self.ledger.has_free or self.ledger.is_blocked:
                return
            if not self.ledger.has_room(worker):
                self._with_room.pop(worker, None)

    def _give(self, lease: Lease, state: _Worker) -> Give:
        state.num_unadmitted += lease.num_rows
        state.latest_fence = lease.fence
        given_up = [
            row
            for row in sorted(self.given_up)
            if any(row in rows for share in lease.shares for rows in share.rows)
        ]
        return Give(lease, sorted_row_ids(given_up))

    def _check_silent(self, now: float) -> Iterator[Look | Kill]:
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        for worker, state in self._workers.items():
            if state.is_fenced:
                continue
            silent_s, idle_s = now - state.heard_at, now - state.busy_at
            if silent_s > BUSY_S or idle_s > SILENT_S:
                state.is_fenced = True
                yield Kill(worker, f"no report for {silent_s:.0f} seconds")
            elif idle_s > LOOK_S and not state.is_looked_at:
                state.is_looked_at = True
                yield Look(worker)

    def _take_back(self, now: float) -> Iterator[TakeBack]:
        """Ask those with most left to do, one for each worker without."""
        hungry = [
            worker
            for worker in self._with_room
            if not (state := self._workers[worker]).num_unadmitted and state.case is None
        ]
        wanted = sum(map(self.ledger.has_room, hungry)) - sum(
            state.is_asked for state in self._workers.values()
        )
        if wanted <= 0:
            return
        willing = [
            (state.seconds_left(now), worker)
            for worker, state in self._workers.items()
            if state.num_unadmitted > 1 and not state.is_asked and state.case is None
        ]
        for _, worker in nlargest(wanted, willing):
            self._workers[worker].is_asked = True
            yield TakeBack(worker, everything=False)

    def _suspect(self, in_flight: set[int]) -> None:
        suspects = in_flight & self._marked
        self._marked ^= in_flight  # a suspect's deaths are counted by its case from now on
        if not suspects:
            return
        rows = tuple(sorted(suspects))
        history = CrashHistory(crashes=1, in_flight=rows).after_death("", suspects, set())
        self.ledger.set_aside(sorted_row_ids(suspects))
        self._cases.append(_Case.of(history.groups))

    def _blame(self, case: _Case, worker: str, in_flight: RowIds, finished: RowIds) -> None:
        """Count a death while a group of suspects ran alone."""
        left = {row for group in case.history.groups for row in group} - {*finished.tolist()}
        self.ledger.set_aside(sorted_row_ids(left & {*case.history.groups[0]}))
        if len(case.history.groups[0]) == 1 and len(in_flight) and not len(finished):
            history = self._after_death_alone(case)
        else:
            history = case.history.after_death(
                worker, {*in_flight.tolist()}, {*finished.tolist()}
            ).among(left)
        self._next_group(case, history)

    def _after_death_alone(self, case: _Case) -> CrashHistory:
        """A case's history after a death while a single row ran, which may be what it died of."""
        row, *_ = case.history.groups[0]
        deaths, progress_before = self._alone.get(row, (0, self._progress))
        self._alone[row] = (deaths + 1, progress_before)
        if deaths + 1 < DEATHS_TO_GIVE_UP:
            return replace(case.history, deaths=deaths + 1)
        later = case.history.groups[1:]
        if self._may_be_of_machine(row):
            self._cases.append(_Case(CrashHistory(groups=((row,),), deaths=deaths + 1)))
            return replace(case.history, groups=later, deaths=0)
        self.given_up.add(row)
        self.ledger.take_back_aside(sorted_row_ids([row]))
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
        suspects = (row for case in self._cases for group in case.history.groups for row in group)
        return (
            self.ledger.rows_unleased > 0
            or any(
                state.case is None and self.ledger.leases_of(worker)
                for worker, state in self._workers.items()
            )
            or any(self._alone.get(row, (0, 0))[0] < DEATHS_TO_GIVE_UP for row in suspects)
        )

    def _next_group(self, case: _Case, history: CrashHistory) -> None:
        """Go on with a case; its worker is kept for it, if it lives."""
        case.history = CrashHistory(groups=history.groups, deaths=history.deaths)
        case.fence = None
        if case.worker not in self._workers:
            case.worker = None
        if not history.groups:
            self._cases.remove(case)
            if case.worker is not None:
                self._workers[case.worker].case = None

    def _reserve(self) -> None:
        """Keep a worker for each case as far as there are workers; the one with least to do."""
        for case in self._cases:
            if case.worker is None and not self._waits(case):
                others = [
                    (len(self.ledger.leases_of(worker)), state.num_unadmitted, worker)
                    for worker, state in self._workers.items()
                    if state.case is None
                ]
                if not others:
                    return
                case.worker = min(others)[-1]
                self._workers[case.worker].case = case

    def _waits(self, case: _Case) -> bool:
        """Whether other rows have to tell first that the machine is not at fault."""
        group = case.history.groups[0]
        return len(group) == 1 and self._may_be_of_machine(group[0])

    def _run_apart(self, worker: str, state: _Worker, case: _Case) -> Iterator[Action]:
        """Give a worker the first group of its case as soon as it has nothing else."""
        if case.fence is not None:
            return
        if not self.ledger.leases_of(worker):
            lease = self.ledger.grant_aside(worker, sorted_row_ids(case.history.groups[0]))
            case.fence = lease.fence
            yield self._give(lease, state)
        elif state.num_unadmitted and not state.is_asked:
            state.is_asked = True
            yield TakeBack(worker, everything=True)
