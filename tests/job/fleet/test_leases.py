"""Leases in random order and size, deaths, thaws, workers that come and go: each row once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchinfer.errors import DeviceError
from batchinfer.job.fleet.dispatcher import (
    BUSY_S,
    LOOK_S,
    LOOKED_S,
    SILENT_S,
    Action,
    Dispatcher,
    Give,
    Kill,
    Look,
)
from batchinfer.job.fleet.lease import Lease
from batchinfer.job.fleet.leases import MAX_UNPUBLISHED, LeaseLedger
from batchinfer.job.output.recovery.quarantine import (
    MOST_FRUITLESS,
    CrashHistory,
    crash_history_from,
)
from batchinfer.job.row_ids import NO_ROWS, Part, RowIds, sorted_row_ids
from tests.job.fleet.fake_fleet import FakeFleet

SMALL = st.integers(0, 12)


def make_parts(*sizes: int) -> list[Part]:
    """Parts of so many rows."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [
        Part(index, range(start, start + size))
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def advance(fleet: FakeFleet, num_workers: int = 2) -> None:
    """Let each worker run some rows, and start one where too few live."""
    if len(fleet.workers) < num_workers:
        fleet.start_worker()
    for name in list(fleet.workers):
        for act in (
            lambda name=name: fleet.admit(name, 8),
            lambda name=name: fleet.finish(name, 8),
            *[lambda name=name: fleet.hear(name)] * 20,
        ):
            if name in fleet.workers:
                act()
    fleet.publish()


def finish_job(fleet: FakeFleet, num_workers: int = 2) -> None:
    """Let a fleet run to its end, with a new worker for each that dies."""
    for _ in range(10_000):
        if fleet.ledger.is_complete:
            return
        advance(fleet, num_workers)
    raise AssertionError("the job does not end")


class FleetMachine(RuleBasedStateMachine):
    """A job on workers to which anything happens at any time."""

    @initialize(
        sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
        window=st.integers(1, 40),
        done=st.sets(st.integers(0, 40)),
        poison=st.sets(st.integers(0, 60), max_size=2),
    )
    def begin(self, sizes: list[int], window: int, done: set[int], poison: set[int]) -> None:
        parts = make_parts(*sizes)
        done = {row for row in done if row < sum(sizes)}
        self.fleet = FakeFleet(parts, window, frozenset(done), frozenset(poison - done))
        self.fleet.start_worker()

    @precondition(lambda self: len(self.fleet.workers) < 5)
    @rule()
    def join(self) -> None:
        self.fleet.start_worker()

    @precondition(lambda self: self.fleet.workers)
    @rule(
        data=st.data(),
        count=SMALL,
        what=st.sampled_from(
            ["admit", "finish", "flush", "hear", "hear", "hear", "kill", "freeze"]
        ),
    )
    def happen(self, data: st.DataObject, count: int, what: str) -> None:
        fleet = self.fleet
        name = data.draw(st.sampled_from(sorted(fleet.workers)))
        try:
            match what:
                case "admit":
                    fleet.admit(name, count)
                case "finish":
                    fleet.finish(name, count)
                case "flush":
                    fleet.flush(name)
                case "hear":
                    fleet.hear(name)
                case "kill":
                    fleet.kill(name, late=False)
                case "freeze":
                    fleet.kill(name, late=True)
        except DeviceError:
            fleet.dispatcher._fruitless = 0  # here anybody may be killed as often as they like

    @precondition(lambda self: any(ghost.told for ghost in self.fleet.ghosts))
    @rule()
    def thaw(self) -> None:
        """What a fenced worker has told arrives after all."""
        next(ghost for ghost in self.fleet.ghosts if ghost.told).told.popleft()()
        self.fleet.act()

    @rule()
    def publish(self) -> None:
        self.fleet.publish()

    @invariant()
    def holds(self) -> None:
        fleet = self.fleet
        fleet.ledger.check_invariants()
        for index, rows in fleet.published.items():
            assert rows == set(fleet.parts[index].rows)

    def teardown(self) -> None:
        fleet = self.fleet
        fleet.dispatcher._fruitless = -1000
        finish_job(fleet)
        assert fleet.published.keys() == fleet.parts.keys()
        if fleet.poison:  # else any row may be that of two chance kills
            assert fleet.failed <= fleet.poison


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


@pytest.mark.long
class TestFleetLonger(FleetMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_poison_row_is_given_up_and_no_other(num_workers: int) -> None:
    poison = frozenset({5, 77, 78, 143})
    fleet = FakeFleet(make_parts(*[16] * 10), 64, poison=poison)
    finish_job(fleet, num_workers)
    assert fleet.failed == poison
    assert fleet.published.keys() == set(range(10))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_row_that_is_the_last_one_left_can_be_given_up(num_workers: int) -> None:
    fleet = FakeFleet(make_parts(4, 4), 64, frozenset(range(7)), frozenset({7}))
    finish_job(fleet, num_workers)
    assert fleet.failed == {7}


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_where_no_row_is_ever_finished_none_is_given_up(num_workers: int) -> None:
    """The machine is at fault, and not the rows that it was at."""
    fleet = FakeFleet(make_parts(*[16] * 10), 64, poison=frozenset(range(160)))
    with pytest.raises(DeviceError, match="die one after another"):
        finish_job(fleet, num_workers)
    assert not fleet.dispatcher.suspects.given_up


def test_a_driver_goes_on_from_what_workers_of_the_one_before_died_of() -> None:
    """Each dies after the first death that it sees."""
    parts, poison = make_parts(*[16] * 10), frozenset({5, 77})
    done, history = frozenset[int](), CrashHistory()
    for _ in range(30):
        fleet = FakeFleet(parts, 64, done, poison)
        fleet.dispatcher.suspects.adopt(history.among({*range(160)} - done))
        while fleet.num_started < 3 and not fleet.ledger.is_complete:
            advance(fleet)
        if fleet.ledger.is_complete:
            break
        for name in fleet.workers:
            fleet.flush(name)
        done = frozenset(fleet.disk.union(*fleet.published.values()))
        history = crash_history_from(fleet.dispatcher.suspects.history.to_json())
    assert fleet.ledger.is_complete
    assert fleet.failed <= poison


def test_leases_shrink_with_what_is_left_and_end_in_single_parts() -> None:
    ledger = LeaseLedger(make_parts(*[10] * 40), {}, 100)
    sizes = []
    while (lease := ledger.grant("w01", 2)) is not None:
        sizes.append(lease.num_rows)
        for share in lease.shares:
            assert ledger.draft(lease.fence, share.part.index)
            ledger.published(share.part.index)
        ledger.end(lease.fence)
    assert sizes[0] == 100
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 10
    assert ledger.is_complete


def test_who_is_up_first_leaves_rows_to_those_who_come() -> None:
    ledger = LeaseLedger(make_parts(*[10] * 40), {}, 400)
    dispatcher = Dispatcher(ledger)
    dispatcher.num_coming = 1
    dispatcher.ready("w01", 0.0)
    given = [act for act in dispatcher.actions(0.0) if isinstance(act, Give)]
    assert [give.lease.num_rows for give in given] == [100, 70]


def test_a_worker_has_two_leases_at_most() -> None:
    ledger = LeaseLedger(make_parts(*[10] * 40), {}, 20)
    assert ledger.grant("w01", 1) is not None
    assert ledger.grant("w01", 1) is not None
    assert ledger.grant("w01", 1) is None
    assert ledger.grant("w02", 1) is not None


def test_nothing_is_leased_while_too_many_drafts_wait() -> None:
    ledger = LeaseLedger(make_parts(*[1] * 200), {}, 100)
    lease = ledger.grant("w01", 1)
    assert lease is not None
    for share in lease.shares[:MAX_UNPUBLISHED]:
        assert ledger.draft(lease.fence, share.part.index)
    assert ledger.grant("w02", 1) is None
    ledger.published(0)
    assert ledger.grant("w02", 1) is not None


def test_the_draft_of_a_lease_that_was_revoked_is_refused() -> None:
    ledger = LeaseLedger(make_parts(4), {}, 100)
    old = ledger.grant("w01", 1)
    assert old is not None
    ledger.revoke(old.fence, sorted_row_ids([0, 1]))
    new = ledger.grant("w02", 1)
    assert new is not None
    assert new.shares[0].rows == (range(2, 4),)
    assert not ledger.draft(old.fence, 0)
    assert ledger.draft(new.fence, 0)
    assert not ledger.draft(new.fence, 0)


def test_rows_of_drafts_are_not_lost_with_their_worker() -> None:
    """They were in flight once, as its log says: they must not be blamed, nor run again."""
    ledger = LeaseLedger(make_parts(4, 4), {}, 100)
    lease = ledger.grant("w01", 1)
    assert lease is not None
    second = ledger.grant("w01", 1)
    assert second is not None
    assert ledger.rows_held("w01").tolist() == list(range(8))
    assert ledger.draft(lease.fence, 0)
    assert ledger.rows_held("w01").tolist() == [4, 5, 6, 7]
    ledger.published(0)
    ledger.give_back(second.fence, sorted_row_ids([7]))
    assert ledger.rows_held("w01").tolist() == [4, 5, 6]


def test_a_part_whose_rows_two_leases_ran_is_made_by_a_third() -> None:
    ledger = LeaseLedger(make_parts(8), {}, 100)
    slow = ledger.grant("w01", 2)
    assert slow is not None
    ledger.give_back(slow.fence, sorted_row_ids([4, 5, 6, 7]))
    quick = ledger.grant("w02", 2)
    assert quick is not None
    assert not quick.shares[0].makes
    assert not ledger.draft(slow.fence, 0)
    ledger.end(quick.fence)
    assert ledger.grant("w02", 2) is None
    ledger.end(slow.fence)
    last = ledger.grant("w02", 2)
    assert last is not None
    assert last.shares[0].makes
    assert not last.num_rows


def of_the_silent(dispatcher: Dispatcher, now: float) -> list[Action]:
    """What is to be done about workers that tell nothing."""
    return [act for act in dispatcher.actions(now) if isinstance(act, Look | Kill)]


def test_a_silent_worker_is_looked_at_and_killed_unless_it_computes() -> None:
    dispatcher = Dispatcher(LeaseLedger(make_parts(8), {}, 100))
    for worker in ("told", "frozen", "busy"):
        dispatcher.ready(worker, 0.0)

    assert not of_the_silent(dispatcher, 1.0)
    dispatcher.reported("told", 10.0, 0, 0, 0)
    assert of_the_silent(dispatcher, LOOK_S + 1) == [Look("frozen"), Look("busy")]
    assert not of_the_silent(dispatcher, LOOK_S + 2)
    dispatcher.seen("frozen", LOOK_S + 2, is_busy=False)
    dispatcher.seen("busy", LOOK_S + 2, is_busy=True)
    assert of_the_silent(dispatcher, SILENT_S + 1) == [Kill("frozen", "no report for 16 seconds")]
    dispatcher.died("frozen", NO_ROWS, NO_ROWS)
    for now in range(30, 400, 10):
        dispatcher.seen("busy", now, is_busy=True)
        dispatcher.reported("told", now, 0, 0, 0)
        for act in of_the_silent(dispatcher, now):
            assert act == Kill("busy", f"no report for {now:.0f} seconds")
            assert now > BUSY_S
            return
    raise AssertionError("it is waited for without end")


def test_what_is_seen_of_a_silent_worker_is_waited_for() -> None:
    """Seconds pass where a machine is busy until anything begins to look."""
    dispatcher = Dispatcher(LeaseLedger(make_parts(8), {}, 100))
    for worker in ("busy", "on a dead node"):
        dispatcher.ready(worker, 0.0)
    assert of_the_silent(dispatcher, LOOK_S + 1) == [Look("busy"), Look("on a dead node")]
    assert not of_the_silent(dispatcher, SILENT_S + 1)
    dispatcher.seen("busy", SILENT_S + 2, is_busy=True)
    killed = Kill("on a dead node", "no report for 22 seconds")
    assert of_the_silent(dispatcher, LOOK_S + LOOKED_S + 2) == [killed]


def test_nobody_is_silent_while_nobody_can_be_heard() -> None:
    dispatcher = Dispatcher(LeaseLedger(make_parts(8), {}, 100))
    dispatcher.ready("w01", 0.0)
    assert of_the_silent(dispatcher, LOOK_S + 1) == [Look("w01")]
    dispatcher.unheard(60.0)
    assert not of_the_silent(dispatcher, 60.0 + SILENT_S + 1)
    killed = Kill("w01", "no report for 22 seconds")
    assert of_the_silent(dispatcher, 60.0 + LOOK_S + LOOKED_S + 2) == [killed]


def test_a_row_alone_that_keeps_tokens_gets_on() -> None:
    """However often its worker is lost; without tokens it is given up, as ever."""
    row = sorted_row_ids([2])
    dispatcher = Dispatcher(LeaseLedger(make_parts(4, 4), {}, 4))
    dispatcher.suspects.adopt(CrashHistory(groups=((2,),)))

    def lose_worker(number: int, with_tokens: RowIds) -> None:
        dispatcher.ready(f"w{number}", 0.0)
        assert any(
            isinstance(act, Give) and act.lease.shares[0].rows == (range(2, 3),)
            for act in dispatcher.actions(0.0)
        )
        dispatcher.died(f"w{number}", row, NO_ROWS, with_tokens)
        dispatcher.suspects.note_progress()  # by others

    for number in range(MOST_FRUITLESS):
        lose_worker(number, row)
    assert not dispatcher.suspects.given_up
    for number in range(2):
        lose_worker(100 + number, NO_ROWS)
    assert dispatcher.suspects.given_up == {2}


def test_rows_that_keep_tokens_are_no_suspects() -> None:
    """However often their workers are lost; those that keep none twice in a row are."""
    dispatcher = Dispatcher(LeaseLedger(make_parts(8, 4), {}, 8))
    rows = sorted_row_ids([0, 1, 2])

    def lose_worker(number: int, *with_tokens: int) -> CrashHistory:
        dispatcher.ready(f"w{number}", 0.0)
        dispatcher.died(f"w{number}", rows, NO_ROWS, sorted_row_ids(with_tokens))
        return dispatcher.suspects.history

    for number in range(4):
        assert lose_worker(number, 0, 1, 2) == CrashHistory()
    assert lose_worker(4, 0).in_flight == (1, 2)
    history = lose_worker(5, 0, 1)
    assert (history.groups, history.in_flight) == (((2,),), ())


def test_workers_that_keep_tokens_may_be_lost_more_often() -> None:
    rows = sorted_row_ids(range(4))
    for with_tokens, most in ((NO_ROWS, 4), (rows, 4 + MOST_FRUITLESS)):
        dispatcher = Dispatcher(LeaseLedger(make_parts(4), {}, 4))
        for number in range(most):
            dispatcher.ready(f"w{number}", 0.0)
            dispatcher.died(f"w{number}", NO_ROWS, NO_ROWS, with_tokens)
        dispatcher.ready("last", 0.0)
        with pytest.raises(DeviceError, match="die one after another"):
            dispatcher.died("last", NO_ROWS, NO_ROWS, with_tokens)


def test_a_worker_that_was_silent_died_of_no_row() -> None:
    """However often: its rows run again beside others."""
    ledger = LeaseLedger(make_parts(8), {}, 100)
    dispatcher = Dispatcher(ledger)
    for number in range(4):
        now = 100.0 * number
        dispatcher.ready(f"w{number}", now)
        assert any(isinstance(act, Give) for act in dispatcher.actions(now))
        assert any(isinstance(act, Kill) for act in dispatcher.actions(now + SILENT_S + 1))
        dispatcher.died(f"w{number}", sorted_row_ids([3, 4]), NO_ROWS)
    assert not dispatcher.suspects.history.rows


def test_workers_that_die_without_a_finished_row_end_the_job() -> None:
    dispatcher = Dispatcher(LeaseLedger(make_parts(8), {}, 100))

    def die_in_turn() -> None:
        for number in range(100):
            dispatcher.ready(f"w{number}", 0.0)
            list(dispatcher.actions(0.0))
            dispatcher.died(f"w{number}", NO_ROWS, NO_ROWS)

    with pytest.raises(DeviceError, match="die one after another"):
        die_in_turn()


class Counting(LeaseLedger):
    """Counts how often it is asked for a lease."""

    num_asked = 0

    def grant(self, worker: str, num_workers: int) -> Lease | None:
        self.num_asked += 1
        return super().grant(worker, num_workers)


def test_of_a_thousand_workers_those_alone_are_looked_at_who_have_room() -> None:
    ledger = Counting(make_parts(*[1] * 5000), {}, 1)
    dispatcher = Dispatcher(ledger)
    for number in range(1000):
        dispatcher.ready(f"w{number}", 0.0)
    given = [act.lease for act in dispatcher.actions(0.0) if isinstance(act, Give)]
    assert len(given) == 2000
    ledger.num_asked = 0
    done = next(lease for lease in given if lease.worker == "w7")
    ledger.draft(done.fence, done.shares[0].part.index)
    ledger.published(done.shares[0].part.index)
    dispatcher.ended("w7", done.fence)
    (again,) = dispatcher.actions(0.1)
    assert isinstance(again, Give)
    assert again.lease.worker == "w7"
    assert ledger.num_asked <= 2
    assert not list(dispatcher.actions(0.2))
    assert ledger.num_asked <= 2
