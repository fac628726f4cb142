"""The decisions of a fleet's driver: who gets which rows, who gives some back, who is dead.

It has no clock, no processes and no files: it is told what happened and when, and says what to do.

Every row in flight when a worker dies may be what it died of. A row that two deaths have in common
is a suspect: suspects run apart, by halves, each half alone on one worker while the others go on
(``output/quarantine.py``, whose histories these are). A row is given up when two workers have died
while it ran alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from batchinfer.errors import DeviceError
from batchinfer.job.fleet.leases import Lease, LeaseLedger
from batchinfer.job.output.quarantine import CrashHistory
from batchinfer.job.row_ids import RowIds, sorted_row_ids

SILENT_S = 15.0
"""A worker that has told nothing for so long is killed: three reports are missing."""
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
class Kill:
    """End a worker's process, whatever it is at."""

    worker: str
    reason: str


Action = Give | TakeBack | Kill


@dataclass
class _Case:
    """Suspects of some deaths, which run apart."""

    history: CrashHistory
    worker: str | None = None
    """Who runs, or is to run, the first group."""
    fence: int | None = None


@dataclass
class _Worker:
    ready_at: float
    heard_at: float
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
            self._cases.append(_Case(CrashHistory(groups=history.groups, deaths=history.deaths)))

    def ready(self, worker: str, now: float) -> None:
        """A worker has loaded its model."""
        self._workers[worker] = _Worker(now, now)

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
            self._fruitless = 0
        state.heard_at, state.rows_done = now, rows_done
        if latest_fence == state.latest_fence:  # else rows are on the way to it
            state.num_unadmitted = num_unadmitted

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
        for case in list(self._cases):
            if case.fence == fence:
                self._next_group(case, CrashHistory(groups=case.history.groups[1:]))

    def died(self, worker: str, in_flight: RowIds, finished: RowIds) -> None:
        """A worker is gone, or was fenced.

        Args:
            in_flight: rows of its leases that it ran, or made ready to, and that are not finished.
            finished: rows of its leases that are on disk.

        Raises:
            DeviceError: workers die one after another, and nothing is done.
        """
        state = self._workers.pop(worker, None)
        for lease in self.ledger.leases_of(worker):
            self.ledger.revoke(lease.fence, finished)
        if state is None:
            return
        self._fruitless = 0 if len(finished) else self._fruitless + 1
        case = state.case
        if case is not None and case.fence is not None:
            self._blame(case, worker, in_flight, finished)
            return
        if case is not None:
            case.worker = None
        self._suspect({*in_flight.tolist()})
        if not self._cases and self._fruitless > FRUITLESS_DEATHS * (1 + len(self._workers)):
            raise DeviceError(
                f"workers die one after another: {self._fruitless} without a finished row",
                hint="the logs in _batchinfer/logs say what they were at",
            )

    def actions(self, now: float) -> Iterator[Action]:
        """What to do next; each is done before the following is asked for."""
        yield from self._kills(now)
        self._reserve()
        for worker, state in self._workers.items():
            if state.case is not None:
                yield from self._run_apart(worker, state, state.case)
        hungry: list[str] = []
        for worker, state in self._workers.items():
            if state.case is None:
                while (lease := self.ledger.grant(worker, len(self._workers))) is not None:
                    yield self._give(lease, state)
                if not state.num_unadmitted and self.ledger.has_room(worker):
                    hungry.append(worker)
        if hungry and not self.ledger.has_free:
            yield from self._take_back(len(hungry), now)

    def _give(self, lease: Lease, state: _Worker) -> Give:
        state.num_unadmitted += lease.num_rows
        state.latest_fence = lease.fence
        given_up = [
            row
            for row in sorted(self.given_up)
            if any(row in rows for share in lease.shares for rows in share.rows)
        ]
        return Give(lease, sorted_row_ids(given_up))

    def _kills(self, now: float) -> Iterator[Kill]:
        for worker, state in self._workers.items():
            if now - state.heard_at > SILENT_S:
                state.heard_at = now  # once, until it is gone
                yield Kill(worker, f"no report for {SILENT_S:.0f} seconds")

    def _take_back(self, num_hungry: int, now: float) -> Iterator[TakeBack]:
        """Ask those with most left to do, one for each worker without."""
        asked = sum(state.is_asked for state in self._workers.values())
        willing = [
            (state.seconds_left(now), worker)
            for worker, state in self._workers.items()
            if state.num_unadmitted > 1 and not state.is_asked and state.case is None
        ]
        for _, worker in sorted(willing, reverse=True)[: max(0, num_hungry - asked)]:
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
        self._cases.append(_Case(history))

    def _blame(self, case: _Case, worker: str, in_flight: RowIds, finished: RowIds) -> None:
        """Count a death while a group of suspects ran alone."""
        left = {row for group in case.history.groups for row in group} - {*finished.tolist()}
        self.ledger.set_aside(sorted_row_ids(left & {*case.history.groups[0]}))
        history = case.history.after_death(
            worker, {*in_flight.tolist()}, {*finished.tolist()}
        ).among(left)
        if history.given_up:
            self.given_up.update(history.given_up)
            self.ledger.take_back_aside(sorted_row_ids(history.given_up))
        self._next_group(case, CrashHistory(groups=history.groups, deaths=history.deaths))

    def _next_group(self, case: _Case, history: CrashHistory) -> None:
        """Go on with a case; its worker is kept for it, if it lives."""
        case.history, case.fence = history, None
        if case.worker not in self._workers:
            case.worker = None
        if not history.groups:
            self._cases.remove(case)
            if case.worker is not None:
                self._workers[case.worker].case = None

    def _reserve(self) -> None:
        """Keep a worker for each case as far as there are workers; the one with least to do."""
        for case in self._cases:
            if case.worker is None:
                others = [
                    (len(self.ledger.leases_of(worker)), state.num_unadmitted, worker)
                    for worker, state in self._workers.items()
                    if state.case is None
                ]
                if not others:
                    return
                case.worker = min(others)[-1]
                self._workers[case.worker].case = case

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
