"""The process that has joined a cluster: what becomes of a fleet's calls where that is late."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Event
from typing import Any

import pytest

from batchinfer.errors import DeviceError, ModelError, UsageError
from batchinfer.job.fleet.messages import Failure
from batchinfer.job.fleet.on_ray import joiner as joiners
from batchinfer.job.fleet.on_ray import ray_process
from batchinfer.job.fleet.on_ray.joiner import Joiner, begun_ahead
from batchinfer.job.fleet.on_ray.ray_main import ToJoin
from batchinfer.job.fleet.on_ray.ray_process import RayProcess
from batchinfer.job.fleet.workers import Lost, Unheard

TO_JOIN = ToJoin("local", 2)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def joiner(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Connection]:
    """That process's end of the connection to its driver."""
    ours, theirs = Pipe()
    said = BytesIO(b"one line\nwhy it ended\n")
    monkeypatch.setattr(ray_process, "begun", lambda: Joiner(process, ours, said))
    monkeypatch.setattr(ray_process, "_LATE_S", 0.0)
    monkeypatch.setattr(joiners, "END_S", 0.0)
    monkeypatch.setattr(ray_process, "END_S", 0.0)
    with theirs:
        yield theirs


def joined(joiner: Connection) -> RayProcess:
    """Its driver's side, once it has said how many GPUs there are."""
    workers = RayProcess(TO_JOIN, 60.0, Event())
    joiner.send(3)
    assert workers.join(60.0) == 3
    assert joiner.recv() == TO_JOIN
    return workers


def test_one_that_takes_nothing_holds_nobody_up(
    joiner: Connection, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe is full after some messages that nobody reads: who writes then waits without end."""
    workers = joined(joiner)
    for _ in range(20):
        workers.kill("w" * 10**6)
    assert not process.poll()
    monkeypatch.setattr(ray_process, "HUNG_S", -1.0)
    assert workers.wait(0.0) == [Lost("its process does not answer any more")]
    assert process.poll() == -9


def test_what_is_sent_goes_on_while_an_answer_is_late(joiner: Connection) -> None:
    workers = joined(joiner)
    workers.wait(0.0)
    workers.stop("w01")
    workers.wait(0.0)  # asks once alone
    assert joiner.recv() == ("wait", (0.0,), {})
    assert joiner.recv() == ("stop", ("w01",), {})
    joiner.send([Lost("as an event")])
    assert workers.wait(60.0) == [Lost("as an event")]


def test_one_that_does_not_answer_any_more_is_killed(
    joiner: Connection, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = joined(joiner)
    monkeypatch.setattr(ray_process, "HUNG_S", -1.0)
    assert workers.wait(0.0) == [Lost("its process does not answer any more")]
    assert process.poll() == -9


def test_one_that_has_ended_says_why(joiner: Connection, process: subprocess.Popen[bytes]) -> None:
    workers = joined(joiner)
    process.kill()
    joiner.close()
    workers.stop("w01")  # nobody hears it
    assert workers.wait(0.0) == [Lost("its process ended with -9: why it ended")]


def test_one_that_ends_before_it_has_joined(
    joiner: Connection, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    joiner.close()
    with pytest.raises(DeviceError, match=r"\(local\) cannot be used: .* why it ended"):
        RayProcess(TO_JOIN, 60.0, Event()).join(60.0)


def test_one_that_has_closed_its_end_and_lives_is_killed(joiner: Connection) -> None:
    joiner.close()
    with pytest.raises(DeviceError, match="ended with -9"):
        RayProcess(TO_JOIN, 60.0, Event()).join(60.0)


def test_one_that_cannot_join_says_what_it_met(joiner: Connection) -> None:
    joiner.send(Failure("ModelError", "no such model"))
    with pytest.raises(ModelError, match="no such model"):
        RayProcess(TO_JOIN, 60.0, Event()).join(60.0)


def test_where_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process, "is_installed", lambda: False)
    with pytest.raises(UsageError, match=r"needs Ray\npip install '\.\[ray\]'"):
        RayProcess(TO_JOIN, 60.0, Event()).join(60.0)


def test_one_is_not_waited_for_when_the_job_is_to_stop(joiner: Connection) -> None:
    stop = Event()
    stop.set()
    workers = RayProcess(TO_JOIN, 60.0, stop)
    joiner.send(3)
    assert workers.join(60.0) is None
    setup: Any = "never used"
    workers.use(setup, {}, ())
    workers.start("w01", "run-00001-w01", frozenset())
    assert workers.wait(0.0) == []


def test_one_that_joins_too_late_is_not_listened_to(
    joiner: Connection, process: subprocess.Popen[bytes]
) -> None:
    workers = RayProcess(TO_JOIN, 60.0, Event())
    with pytest.raises(DeviceError, match="not answered within"):
        workers.join(-1.0)
    assert process.poll() == -9
    assert workers.wait(0.0) == []


def test_how_long_nobody_was_heard_is_told(joiner: Connection) -> None:
    workers = joined(joiner)
    [late] = workers.wait(0.01)
    assert isinstance(late, Unheard)
    assert late.seconds >= 0.01
    joiner.send([])
    assert workers.wait(60.0) == []


def test_one_that_was_begun_ahead_joins_first(
    joiner: Connection, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ray_process.begun()
    monkeypatch.setattr(ray_process, "begun", lambda: pytest.fail("another one is begun"))
    workers = RayProcess(TO_JOIN, 60.0, Event(), first)
    joiner.send(3)
    assert workers.join(60.0) == 3
    workers.end()
    assert process.poll() == -9
    first.end(0.0)  # once more


def test_one_that_was_begun_ahead_and_is_not_needed_ends() -> None:
    with begun_ahead() as process:
        assert process is not None
        assert process.process.poll() is None
    assert process.process.poll() is not None


def test_none_is_begun_ahead_where_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiners, "is_installed", lambda: False)
    with begun_ahead() as process:
        assert process is None
