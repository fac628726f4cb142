"""Files that come and go with messages, between a worker and a driver in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.job.fleet.files import inbox as inbox_module
from batchinfer.job.fleet.files import outbox as outbox_module
from batchinfer.job.fleet.files import relay
from batchinfer.job.fleet.files.access import lent, worker_output
from batchinfer.job.fleet.files.inbox import Inboxes, read_wanted
from batchinfer.job.fleet.files.outbox import Outbox
from batchinfer.job.fleet.messages import Appended, Deleted, FileChange, Piece, Wanted, WorkerReport
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import read_file
from tests.job.fakes import begin

PLAN = Manifest("f", {}, (), (), 12, 4, "2026-11-20T10:00:00")
RUN = "run-00001-w01"
PIECE = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few bytes are of several pieces."""
    for module in (outbox_module, relay, inbox_module):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    """The output, as its driver has it."""
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN)
    return out


def elsewhere(outbox: Outbox) -> OutputDir:
    """The output, as a worker has it whose disk is another."""
    return worker_output("/nowhere/out", b"of the driver", "w01", RUN, outbox)[0]


@contextmanager
def driven(
    out: OutputDir, heard: Callable[[WorkerReport], None] = lambda report: None
) -> Iterator[Outbox]:
    """A driver that takes the reports of an outbox, the last one with the end of this."""
    outbox, is_over = Outbox(), threading.Event()

    def drive() -> None:
        inboxes = Inboxes(out)
        while True:
            was_over = is_over.is_set()
            report = outbox.take(0.05)
            inboxes.take(RUN, report.changes)
            for wanted in report.wanted:
                outbox.take_answer(read_wanted(out, wanted))
            heard(report)
            if was_over and not (report.changes or report.wanted):
                inboxes.close(RUN)
                return

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    yield outbox
    is_over.set()
    driver.join(30.0)
    assert not driver.is_alive()


def segment(name: str) -> PurePosixPath:
    return PurePosixPath("segments", name)


@given(
    files=st.lists(st.binary(max_size=40), max_size=12),
    most_waiting=st.sampled_from([1, 20, 1000]),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30
)
def test_what_is_told_comes_after_the_files_before_it(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    files: list[bytes],
    most_waiting: int,
) -> None:
    monkeypatch.setattr(outbox_module, "MOST_WAITING_BYTES", most_waiting)
    out = OutputDir(tmp_path_factory.mktemp("x") / "out")
    begin(out, PLAN)
    told: list[int] = []

    def heard(report: WorkerReport) -> None:
        assert sum(len(change.data) for change in report.changes) < 2 * PIECE
        for number in report.ended:
            told.append(number)
            assert read_file(out.files, out.segments / f"s{number}") == files[number]

    with driven(out, heard) as outbox:
        own = elsewhere(outbox)
        for number, data in enumerate(files):
            own.write(own.segments / f"s{number}", data)

            def ended(report: WorkerReport, number: int = number) -> WorkerReport:
                return replace(report, ended=(*report.ended, number))

            outbox.tell(ended, urgent=number % 2 == 0)
    assert told == list(range(len(files)))
    assert sorted(path.name for path in out.files.entries(out.staging)) == [RUN] * bool(files)
    assert not list(out.files.entries(out.staging / RUN))


def test_who_sends_faster_than_the_driver_takes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MOST_WAITING_BYTES", 3 * PIECE)
    outbox = Outbox()
    sent = threading.Semaphore(0)

    def send() -> None:
        for _ in range(8):
            outbox.send(Piece("segments/s", bytes(PIECE)))
            sent.release()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for _ in range(3):
        assert sent.acquire(timeout=30.0)
    for left in reversed(range(5)):
        assert not sent.acquire(blocking=False), "more is waiting than may"
        assert len(outbox.take(0.0).changes) == 1
        assert sent.acquire(timeout=30.0), left
    sender.join(30.0)
    assert not sender.is_alive()


def test_segments_of_others_are_fetched_and_those_read_last_are_kept(
    out: OutputDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "COPIED_BYTES", 100)
    wanted: list[Wanted] = []
    for name in "abc":
        out.write(out.segments / name, name.encode() * 45)
    with driven(out, lambda report: wanted.extend(report.wanted)) as outbox:
        own = elsewhere(outbox)
        for name in "abacab":
            assert read_file(own.files, own.segments / name) == name.encode() * 45
        own.write(own.segments / "own", b"x" * 40)
        assert read_file(own.files, own.segments / "own") == b"x" * 40
        with pytest.raises(FileNotFoundError, match="nobody"):
            own.files.open(own.segments / "nobody")
    names = [at.path.rpartition("/")[2] for at in wanted if at.offset == 0]
    assert names == ["a", "b", "c", "b", "nobody"]
    assert {at.offset for at in wanted} == {*range(0, 45, PIECE)}


def test_logs_grow_and_go(out: OutputDir) -> None:
    with driven(out) as outbox:
        own = elsewhere(outbox)
        for folder in (own.logs, own.in_flight):
            with own.files.append_to(folder / RUN) as log:
                for text in (b"one ", b"two"):
                    log.write(text)
        own.files.delete(own.in_flight / RUN)
    assert read_file(out.files, out.logs / RUN) == b"one two"
    assert not list(out.files.entries(out.in_flight))


def test_nothing_of_the_output_is_on_the_workers_disk() -> None:
    own = elsewhere(Outbox())
    own.files.make_directory(own.staging)
    own.files.write(own.staging / "part", b"staged")
    assert not Path("/nowhere").exists()


def test_who_sees_the_drivers_nonce_writes_to_its_disk(out: OutputDir) -> None:
    with lent(out) as nonce:
        own, access = worker_output(str(out.root), nonce, "w01", RUN, Outbox())
        assert (access, type(own.files)) == ("disk", type(out.files))
        other, access = worker_output(str(out.root), b"of another", "w01", RUN, Outbox())
        assert (access, type(other.files)) == ("driver", relay.RelayedFiles)


@pytest.mark.parametrize(
    "changes",
    [
        [Piece("segments/s", b"some"), Piece("segments/s", b"thing", "0" * 64)],
        [Piece("../data/part-00000.parquet", b"x", "0")],
        [Piece("parts/part-00000.json", b"x", "0")],
        [Deleted("/etc/passwd")],
        [Appended("logs/../../x", b"x")],
        [Appended("", b"x")],
    ],
)
def test_what_is_not_as_it_was_sent_changes_nothing(
    out: OutputDir, changes: list[FileChange]
) -> None:
    def found() -> set[Path]:
        return {path for path in Path(out.root).rglob("*") if path.is_file()}

    before, inboxes = found(), Inboxes(out)
    with pytest.raises(ValueError, match=r"other bytes|no file of a worker"):
        inboxes.take(RUN, changes)
    assert found() - {Path(out.staging) / RUN / "incoming"} == before


def test_a_file_whose_worker_died_in_the_middle_is_not_there(out: OutputDir) -> None:
    inboxes = Inboxes(out)
    inboxes.take(RUN, [Piece("segments/s", b"some")])
    inboxes.close(RUN)
    assert not list(out.files.entries(out.segments))
