"""Rows in flight when the process died, and what is made of them."""

from __future__ import annotations

import errno
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest

from batchinfer.errors import DataError, StorageError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.recovery.quarantine import CrashHistory, attribute_crashes
from batchinfer.job.run.in_flight_log import InFlightLog
from batchinfer.job.run_ids import run_id
from tests.job.fakes import begin, for_writer

PLAN = Manifest("f", {}, (), (), 12, 4, "2026-11-20T10:00:00")
ALL = [part.rows for part in PLAN.parts()]


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN)
    return out


def die(out: OutputDir, run: int, *row_ids: int) -> None:
    """A run that is killed with these rows in flight."""
    with suppress(KeyboardInterrupt), InFlightLog(out, run_id(run, out.writer)) as log:
        log.note(row_ids)
        raise KeyboardInterrupt


def test_rows_in_flight_at_two_deaths_are_suspects(out: OutputDir) -> None:
    die(out, 1, 3, 5, 6)
    assert attribute_crashes(out, ALL).in_flight == (3, 5, 6)
    die(out, 2, 7, 5, 6)
    assert attribute_crashes(out, ALL).groups == ((5,), (6,))
    assert attribute_crashes(out, ALL).groups == ((5,), (6,)), "which is remembered"


def test_rows_that_were_being_made_into_prompts_are_suspects_too(out: OutputDir) -> None:
    with suppress(KeyboardInterrupt), InFlightLog(out, "run-00001") as log:
        with log.making([0, 1, 2]):
            pass
        log.note([1])
        with log.making([4, 5]):
            raise KeyboardInterrupt
    assert attribute_crashes(out, ALL).in_flight == (1, 4, 5)


@pytest.mark.parametrize("end", [None, DataError("the input is gone")])
def test_a_run_that_ends_in_order_leaves_nothing(out: OutputDir, end: DataError | None) -> None:
    def leave() -> None:
        with InFlightLog(out, "run-00001") as log:
            log.note([1, 2])
            if end:
                raise end

    if end:
        with pytest.raises(DataError):
            leave()
    else:
        leave()
    assert attribute_crashes(out, ALL) == CrashHistory()


def test_rows_that_were_finished_were_not_in_flight(out: OutputDir) -> None:
    die(out, 1, 3, 5, 6)
    left = attribute_crashes(out, [range(0, 4), range(6, 8)])
    assert left.in_flight == (3, 6)
    die(out, 2, 3, 6)
    assert attribute_crashes(out, [range(0, 4)]).groups == (), "6 has finished since"


def test_a_death_counts_once(out: OutputDir, monkeypatch: pytest.MonkeyPatch) -> None:
    die(out, 1, 3, 5)
    with monkeypatch.context() as patch:  # the next run dies after it has written this down

        def die_too(path: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr(out.files, "delete", die_too)
        with pytest.raises(KeyboardInterrupt):
            attribute_crashes(out, ALL)
    assert attribute_crashes(out, ALL).crashes == 1
    assert list(out.in_flight.iterdir()) == []


def test_a_write_cut_short_hides_nothing_before_it(out: OutputDir) -> None:
    die(out, 1, 3, 5)
    path = out.in_flight / "run-00001"
    path.write_bytes(path.read_bytes() + b"\1\2\3")
    assert attribute_crashes(out, ALL).in_flight == (3, 5)


def test_a_damaged_memory_is_no_suspicion(out: OutputDir) -> None:
    out.suspects.write_bytes(b"{")
    assert attribute_crashes(out, ALL) == CrashHistory()


def test_a_log_whose_end_cannot_be_written_is_a_storage_error(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(BytesIO):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(out.files, "append_to", lambda path: Full())
    full = r"cannot write .*run-00001: No space left"
    with pytest.raises(StorageError, match=full), InFlightLog(out, "run-00001") as log:
        log.note([1])


@pytest.mark.parametrize("end", [None, DataError("the input is gone")])
def test_a_log_that_cannot_be_deleted_is_a_storage_error(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch, end: DataError | None
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    def leave() -> None:
        with InFlightLog(out, "run-00001") as log:
            log.note([1, 2])
            if end:
                raise end

    monkeypatch.setattr(out.files, "delete", refuse)
    refused = r"cannot delete .*in_flight/run-00001: Operation not permitted"
    with pytest.raises(type(end) if end else StorageError, match=str(end) if end else refused):
        leave()
    with pytest.raises(StorageError, match=refused):
        attribute_crashes(out, ALL)


FIRST, SECOND = [range(0, 4)], [range(4, 12)]
"""Rows of two writers."""


def test_writers_beside_each_other_know_of_their_own_crashes_alone(out: OutputDir) -> None:
    one, two = for_writer(out, "s0000of2"), for_writer(out, "s0001of2")
    die(one, 1, 1, 2)
    assert attribute_crashes(one, FIRST).in_flight == (1, 2)
    die(two, 1, 5)
    die(one, 2, 2, 3)
    assert attribute_crashes(one, FIRST).groups == ((2,),)
    assert attribute_crashes(two, SECOND) == CrashHistory(
        1, (5,), last_run="run-00001-s0001of2", fruitless=1
    )
    assert [path.name for path in out.in_flight.iterdir()] == []


def test_a_new_writer_takes_up_what_is_known_of_its_rows(out: OutputDir) -> None:
    die(out, 1, 1, 5)
    attribute_crashes(out, ALL)
    die(out, 2, 1, 5, 6)
    one, two = for_writer(out, "s0000of2"), for_writer(out, "s0001of2")
    for writer, rows, row in ((one, FIRST, 1), (two, SECOND, 5)):
        for _ in range(2):  # what it has taken up is its own, and not counted again
            assert attribute_crashes(writer, rows).groups == ((row,),)
    assert [path.name for path in out.in_flight.iterdir()] == ["run-00002"], "it is not theirs"


def test_who_writes_alone_takes_up_everything_as_one_death(out: OutputDir) -> None:
    writers = [for_writer(out, f"s{at:04d}of2") for at in range(2)]
    for writer, row in zip(writers, (1, 5), strict=True):
        die(writer, 1, row)
    history = attribute_crashes(out, ALL)
    assert (history.crashes, history.in_flight) == (1, (1, 5))
    die(writers[0], 2, 1)
    assert attribute_crashes(out, ALL).groups == ((1,),)
    assert [path.name for path in out.state.glob("suspects*")] == ["suspects.json"]
    assert list(out.in_flight.iterdir()) == []


def test_histories_of_writers_are_put_together_once(out: OutputDir) -> None:
    one, two = for_writer(out, "s0000of2"), for_writer(out, "s0001of2")
    one.write(one.suspects, CrashHistory(groups=((1,), (2, 3)), deaths=1).to_json())
    two.write(two.suspects, CrashHistory(groups=((5, 6),), given_up=(7,)).to_json())
    with pytest.MonkeyPatch.context() as patch:

        def die_too(path: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr(out.files, "delete", die_too)
        with pytest.raises(KeyboardInterrupt):
            attribute_crashes(out, ALL)
    merged = CrashHistory(groups=((1,), (2, 3), (5, 6)), deaths=1, given_up=(7,))
    assert attribute_crashes(out, ALL) == merged
    assert attribute_crashes(out, ALL) == merged


def test_what_shards_have_found_out_since_counts_for_who_goes_on_alone(out: OutputDir) -> None:
    """They took up what was there: the row that a run had died of once got on in theirs."""
    one = for_writer(out, "s0000of2")
    out.write(out.suspects, CrashHistory(groups=((1,), (2,)), deaths=1).to_json())
    assert attribute_crashes(one, FIRST).deaths == 1
    one.write(one.suspects, CrashHistory(groups=((1,), (2,))).to_json())
    assert attribute_crashes(out, ALL) == CrashHistory(groups=((1,), (2,)))


def test_deaths_of_a_row_that_was_given_up_since_are_no_other_rows(out: OutputDir) -> None:
    one, two = for_writer(out, "s0000of2"), for_writer(out, "s0001of2")
    one.write(one.suspects, CrashHistory(given_up=(1,)).to_json())
    two.write(two.suspects, CrashHistory(groups=((1,), (5,)), deaths=1).to_json())
    assert attribute_crashes(out, ALL) == CrashHistory(groups=((5,),), given_up=(1,))
