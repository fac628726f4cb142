"""The crash history: suspected rows, and rows that are given up."""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import pytest

from batchinfer.errors import DataError, StorageError
from batchinfer.job.claims.crashed_rows import (
    MOST_FRUITLESS,
    CrashHistory,
    count_deaths,
    crash_history_from,
    stored_history,
)
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.writers import Claims, Writer, dead_logs
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.row_ranges import within
from batchinfer.job.run.in_flight_log import InFlightLog
from batchinfer.job.run_ids import run_id
from tests.job.fakes import begin, for_writer

NONE: frozenset[int] = frozenset()
PLAN = Manifest("f", {}, (), (), 12, 4, "2026-11-20T10:00:00")
ALL = [part.rows for part in PLAN.parts()]


def died(
    before: CrashHistory,
    in_flight: set[int],
    finished: set[int] | frozenset[int] = NONE,
    *,
    kept_tokens: bool = False,
) -> CrashHistory:
    return before.after_death(["run"], in_flight, finished, kept_tokens=kept_tokens)


def hunt(num_rows: int, poison: int, *, keep_tokens: bool = False) -> tuple[int, CrashHistory]:
    """Run rows until the poison row is given up; return the number of deaths and the history.

    Args:
        keep_tokens: whether other rows store tokens before each death.
    """
    history, missing, deaths = CrashHistory(), set(range(num_rows)), 0
    while True:
        finished: set[int] = set()
        missing -= set(history.given_up)
        apart = {row for group in history.groups for row in group}
        for group in (*map(set, history.groups), missing - apart):
            if poison in group & missing:
                deaths += 1
                kept_tokens = keep_tokens and len(group) > 1
                after = died(history, group & missing, finished, kept_tokens=kept_tokens)
                history = after.among(missing)
                break
            finished |= group
            missing -= group
        else:
            return deaths, history


@pytest.mark.parametrize("poison", [0, 500, 999])
def test_crash_row_among_a_thousand_is_found_in_five_deaths(poison: int) -> None:
    deaths, history = hunt(1000, poison)
    assert history.given_up == (poison,)
    assert deaths == 5


def test_crash_row_among_long_answers_is_found() -> None:
    deaths, history = hunt(1000, 500, keep_tokens=True)
    assert history.given_up == (500,)
    assert deaths <= MOST_FRUITLESS + 5


def test_long_answers_that_finish_are_not_suspects() -> None:
    history, missing = CrashHistory(), {*range(30)}
    for row in range(29):
        for _ in range(MOST_FRUITLESS):
            history = died(history, missing, kept_tokens=True).among(missing)
            assert history.groups == ()
        missing = missing - {row}
        history = history.among(missing)


def test_deaths_with_progress_make_no_suspects() -> None:
    history = CrashHistory()
    for row in range(100):
        history = died(history, {row + 1, row + 2}, {row})
        assert history.groups == ()


def test_deaths_with_different_rows_make_no_suspects() -> None:
    history = died(died(CrashHistory(), {1, 2}), {5, 6})
    assert history.groups == ()
    assert died(history, {2, 3}).groups == ((2,),)


def test_death_without_rows_in_flight_is_ignored() -> None:
    once = died(CrashHistory(), {1, 2})
    assert died(once, set()).seen_once == (1, 2)
    assert died(once, set(), {7}).seen_once == (1, 2)


def test_suspect_group_splits_only_rows_in_flight() -> None:
    history = died(CrashHistory(groups=((1, 2, 3, 4, 5), (6,))), {1, 2})
    assert history.groups == ((1,), (2,), (3, 4, 5), (6,))


def test_suspect_group_with_progress_is_not_split() -> None:
    history = died(CrashHistory(groups=((1, 2, 3, 4),)), {3, 4}, {1, 2}).among({3, 4})
    assert history.groups == ((3, 4),)


def test_row_is_given_up_after_two_deaths_alone() -> None:
    once = died(CrashHistory(groups=((7,), (8,))), {7})
    assert (once.groups, once.given_up) == (((7,), (8,)), ())
    other = died(once, {8})
    assert (other.groups, other.given_up, other.died_alone) == (((7,), (8,)), (), (7, 8))
    twice = died(other, {7})
    assert (twice.groups, twice.given_up) == (((8,),), (7,))


def test_finished_rows_leave_the_crash_history() -> None:
    history = CrashHistory((1, 2), ((3, 4), (5,)), (5,), (6,))
    assert history.among({2, 5}) == CrashHistory((2,), ((5,),), (5,), ())
    assert history.rows.tolist() == [1, 2, 3, 4, 5, 6]


def test_damaged_crash_history_is_empty() -> None:
    history = CrashHistory((1, 2), ((3, 4), (5,)), (5,), (6,), ("run-00007",))
    data = json.dumps(asdict(history)).encode()
    assert crash_history_from(data) == history
    absurd = ({"seen_once": "x"}, {"given_up": [1e30]}, {"groups": [[10**20]]})
    others = [json.dumps(asdict(history) | fields).encode() for fields in absurd]
    for torn in (b"", b"[]", b"[" * 100_000, b'{"groups": 3}', data[:-4], *others):
        assert crash_history_from(torn) == CrashHistory()


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN)
    return out


def die(out: OutputDir, run: int, *row_ids: int) -> None:
    """Simulate a run that is killed with these rows in flight."""
    with suppress(KeyboardInterrupt), InFlightLog(out, run_id(run, out.writer)) as log:
        log.note(row_ids)
        raise KeyboardInterrupt


def counted(out: OutputDir, missing: list[range] = ALL) -> CrashHistory:
    """Return the history after counting the deaths in all logs."""
    return count_deaths(out, out.files.entries(out.in_flight), lambda rows: within(rows, missing))


def test_rows_in_flight_at_two_deaths_are_suspects(out: OutputDir) -> None:
    die(out, 1, 3, 5, 6)
    assert counted(out).seen_once == (3, 5, 6)
    die(out, 2, 7, 5, 6)
    assert counted(out).groups == ((5,), (6,))
    assert counted(out).groups == ((5,), (6,)), "the history is stored"


def test_rows_being_made_into_prompts_are_in_flight(out: OutputDir) -> None:
    with suppress(KeyboardInterrupt), InFlightLog(out, "run-00001") as log:
        with log.making([0, 1, 2]):
            pass
        log.note([1])
        with log.making([4, 5]):
            raise KeyboardInterrupt
    assert counted(out).seen_once == (1, 4, 5)


@pytest.mark.parametrize("end", [None, DataError("the input is gone")])
def test_in_flight_log_is_deleted_when_the_run_ends_normally(
    out: OutputDir, end: DataError | None
) -> None:
    with suppress(DataError), InFlightLog(out, "run-00001") as log:
        log.note([1, 2])
        if end:
            raise end
    assert counted(out) == CrashHistory()


def test_finished_rows_do_not_count_as_in_flight(out: OutputDir) -> None:
    die(out, 1, 3, 5, 6)
    assert counted(out, [range(0, 4), range(6, 8)]).seen_once == (3, 6)
    die(out, 2, 3, 6)
    assert counted(out, [range(0, 4)]).groups == (), "row 6 is finished"


def test_death_is_counted_once_if_the_next_run_dies_too(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(out, 1, 3, 5)
    with monkeypatch.context() as patch:  # the next run dies after it has stored the history

        def die_too(path: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr(out.files, "delete", die_too)
        with pytest.raises(KeyboardInterrupt):
            counted(out)
    assert counted(out).groups == ()
    assert list(out.in_flight.iterdir()) == []


def test_torn_in_flight_log_is_read_up_to_the_tear(out: OutputDir) -> None:
    die(out, 1, 3, 5)
    path = out.in_flight / "run-00001"
    path.write_bytes(path.read_bytes() + b"\1\2\3")
    assert counted(out).seen_once == (3, 5)


def test_in_flight_logs_of_living_writers_are_kept(out: OutputDir) -> None:
    """A new process with the name of a dead one has a higher run number."""
    shard = Writer(Shard(0, 2))
    for run, writer in ((1, shard.name), (2, shard.name), (1, "w01"), (4, "")):
        die(for_writer(out, writer), run, 1)
    Claims(out, shard).begin(2)
    dead = [log.name for log in dead_logs(out, [shard])]
    assert dead == ["run-00001-s0000of2", "run-00001-w01", "run-00004"]
    count_deaths(out, dead_logs(out, [shard]), lambda rows: rows)
    assert [log.name for log in out.in_flight.iterdir()] == ["run-00002-s0000of2"]
    assert stored_history(out).seen_once == (1,)


def test_in_flight_log_that_cannot_be_closed_is_a_storage_error(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(BytesIO):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(out.files, "append_to", lambda path: Full())
    full = r"cannot write .*run-00001: No space left"
    with pytest.raises(StorageError, match=full), InFlightLog(out, "run-00001") as log:
        log.note([1])
