"""Workers as Ray actors: what becomes of calls that are lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorUnavailableError

from batchinfer.console import meter
from batchinfer.errors import ExitCode
from batchinfer.job.fleet.messages import Ready, WorkerReport
from batchinfer.job.fleet.on_ray import ray_workers
from batchinfer.job.fleet.on_ray.ray_workers import Place, RayWorkers
from batchinfer.job.fleet.workers import Gone, NotUp, Seen, Told, Up, WorkerEvent
from tests.job.fleet.jobs import expected, fleet_job, part_hashes, run, write_rows
from tests.job.fleet.shared_cluster import shared_cluster


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all jobs here."""
    with shared_cluster(2, preload=("colorsys",)):
        yield


def tells_of_a_part(answer: object) -> bool:
    """Whether it is a report with a part in it."""
    return isinstance(answer, WorkerReport) and bool(answer.drafts)


def is_of_what_was_sent(answer: object) -> bool:
    """Whether it is the answer to a lease, or to another thing that was sent."""
    return answer is None


@pytest.mark.long
@pytest.mark.parametrize("is_lost", [tells_of_a_part, is_of_what_was_sent])
def test_a_lost_call_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: Callable[[object], bool]
) -> None:
    get, lost = ray.get, list[object]()

    def lossy(call: Any, **options: Any) -> Any:
        answer = get(call, **options)
        if not lost and is_lost(answer):
            lost.append(answer)
            raise ActorUnavailableError("the connection broke", None)
        return answer

    monkeypatch.setattr(ray_workers.ray, "get", lossy)
    write_rows(tmp_path, 600)
    spec = fleet_job(tmp_path)
    assert run(spec) == ExitCode.OK
    assert lost
    assert part_hashes(tmp_path / "out") == expected(tmp_path, spec)


class Counts:
    """A worker that counts the things it was given before what was sent before them."""

    def __init__(self, *_: object) -> None:
        self._next = self._num_late = 0

    def where(self) -> Place:
        """Nowhere."""
        return Place("a node", 0)

    def load(self) -> Ready:
        """No model."""
        return Ready("a host", "none", {})

    def give(self, number: int) -> None:
        """Take the number that comes next."""
        self._num_late += number != self._next
        self._next = number + 1

    def stop(self) -> None:
        """Nothing comes any more."""
        self._next = -1

    def report(self, _wait_s: float) -> WorkerReport:
        """How many came late, once nothing comes any more."""
        while self._next >= 0:
            time.sleep(0.01)
        return WorkerReport(counts=meter.Counts(rows=self._num_late), is_over=True)


def test_what_is_sent_comes_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "RayWorker", Counts)
    setup: Any = "never used"
    workers = RayWorkers(setup, {"num_cpus": 1})
    workers.start("w01", "run-00001-w01", frozenset())
    for number in range(2000):
        assignment: Any = number
        workers.give("w01", assignment)
    workers.stop("w01")
    told: list[Told] = []
    while not told:
        told += [event for event in workers.wait(1.0) if isinstance(event, Told)]
    workers.close()
    assert told[0].report.counts.rows == 0


class NeverBegins(Counts):
    """A worker that ends before it has said where it is."""

    def __init__(self, *_: object) -> None:
        raise ImportError("no such module on this node")


def test_what_ends_nobody_knows_where_keeps_no_other_from_being_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup: Any = "never used"
    monkeypatch.setattr(ray_workers, "RayWorker", NeverBegins)
    workers = RayWorkers(setup, {"num_cpus": 1})
    workers.start("w01", "run-00001-w01", frozenset())
    events: list[WorkerEvent] = []
    while not events:
        events = workers.wait(1.0)
    assert isinstance(events[0], NotUp)
    assert events[0].failure.text == "ImportError: no such module on this node"
    assert len(events[0].nodes) == 1
    workers.start("w02", "run-00001-w02", frozenset({events[0].node}))
    workers.close()


class Silent(Counts):
    """A worker that tells nothing."""

    def where(self) -> Place:
        """Where it is."""
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())


class Busy(Silent):
    """One that lets no other thread of its process run."""

    def report(self, _wait_s: float) -> WorkerReport:
        """Nothing, ever."""
        sys.setswitchinterval(1e6)
        while True:
            pass


class Frozen(Silent):
    """One that does nothing."""

    def report(self, _wait_s: float) -> WorkerReport:
        """Nothing, ever."""
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("it goes on")


@pytest.mark.parametrize(("silent", "is_busy"), [(Busy, True), (Frozen, False)])
def test_a_silent_worker_that_computes_is_told_from_a_frozen_one(
    monkeypatch: pytest.MonkeyPatch, silent: type[Silent], is_busy: bool
) -> None:
    monkeypatch.setattr(ray_workers, "RayWorker", silent)
    setup: Any = "never used"
    workers = RayWorkers(setup, {"num_cpus": 1})
    names = (f"w{number:02d}" for number in range(1, 4))
    worker = next(name for name in names if is_silent(workers, name, is_busy=is_busy))
    workers.look(worker)
    seen: list[WorkerEvent] = []
    while not seen:
        seen += workers.wait(1.0)
    workers.close()
    assert seen == [Seen(worker, is_busy=is_busy)]


def is_silent(workers: RayWorkers, name: str, *, is_busy: bool) -> bool:
    """Whether a worker that begins here is up, and computes or is stopped; seldom Ray loses one
    that stops."""
    workers.start(name, f"run-00001-{name}", frozenset())
    while not any(isinstance(event, Up) for event in workers.wait(1.0)):
        pass
    process = psutil.Process(workers._actors[name].place.pid)
    while not is_busy and process.status() != psutil.STATUS_STOPPED:
        if any(isinstance(event, Gone) for event in workers.wait(0.01)):
            return False
    return True


def test_who_waits_for_no_worker_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(ray_workers.time, "sleep", slept.append)
    setup: Any = "never used"
    assert not RayWorkers(setup, {}).wait(0.2)
    assert slept == [0.2]


def test_an_embedded_cluster_starts_no_more_than_it_needs() -> None:
    programs = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            programs |= {Path(word).name for word in process.cmdline()}
    assert "raylet" in programs
    assert not programs & {"dashboard.py", "monitor.py", "log_monitor.py"}


def test_a_worker_has_its_drivers_priority_and_has_imported_what_it_needs() -> None:
    look = ray.remote(lambda: (os.nice(0), "colorsys" in sys.modules))
    assert ray.get(look.remote()) == (os.nice(0), True)
