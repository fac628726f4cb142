"""A fleet's driver beside workers that are told of, and never there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from batchinfer.console.meter import Meter
from batchinfer.console.progress import make_progress
from batchinfer.errors import DeviceError, JobError, ModelError, RowError, StorageError
from batchinfer.job.fleet.boots import FleetSize
from batchinfer.job.fleet.driver import FleetDriver
from batchinfer.job.fleet.messages import (
    Access,
    Assignment,
    Failure,
    Ready,
    WorkerReport,
)
from batchinfer.job.fleet.workers import Gone, Lost, NotUp, Told, Unheard, Up, WorkerEvent
from batchinfer.job.job import OutputJob, open_input, open_job
from batchinfer.job.output.open import output_at
from batchinfer.job.output.recovery.quarantine import LOG_ENTRY, attribute_crashes
from batchinfer.job.output.recovery.recovered_rows import recover_rows
from batchinfer.job.output.resume import plan_resume
from batchinfer.job.output.segments import Segments, segment_table
from batchinfer.job.rows.finished_row import failed_row
from batchinfer.job.rows.generate import GENERATE_TASK
from batchinfer.job.stats.recorder import Run
from batchinfer.job.stats.status import read_status
from tests.job.fakes import begin
from tests.job.fleet.jobs import fleet_job, write_rows

ALONE = FleetSize(1, start_timeout_s=60.0)


def up(worker: str, node: str = "a node", access: Access = "disk") -> Up:
    """A worker has come up."""
    return Up(worker, node, Ready("host", "cpu", {}, access))


def failed(worker: str, kind: str, text: str) -> Told:
    """A worker has ended by an error."""
    return Told(worker, WorkerReport(failure=Failure(kind, text), is_over=True))


@dataclass
class Script:
    """Workers of whom a list of events is told, a second apart, and nothing after that."""

    events: list[WorkerEvent]
    now: float = 0.0
    given: list[Assignment] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    kernels: list[Mapping[str, str]] = field(default_factory=list)
    avoided: list[frozenset[str]] = field(default_factory=list)
    """Nodes that each worker was not to be started on."""
    on_start: Callable[[str], None] = lambda run_id: None

    def start(self, worker: str, run_id: str, avoid: frozenset[str]) -> None:
        self.started.append(worker)
        self.avoided.append(avoid)
        self.on_start(run_id)

    def use_kernels(self, kernels: Mapping[str, str]) -> None:
        self.kernels.append(kernels)

    def give(self, worker: str, assignment: Assignment) -> None:
        self.given.append(assignment)

    def take_back(self, worker: str, *, everything: bool) -> None: ...

    def look(self, worker: str) -> None: ...

    def stop(self, worker: str) -> None: ...

    def kill(self, worker: str) -> None:
        self.killed.append(worker)

    def close(self) -> None: ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        self.now += 1.0
        return [self.events.pop(0)] if self.events else []


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., bool]:
    """Runs the driver of a job that has one row from before, with workers of a script."""
    write_rows(tmp_path, 200)
    spec = fleet_job(tmp_path)
    source = open_input(spec)
    job = open_job(spec, source)
    out = output_at(spec.output.path)
    begin(out, job.manifest)
    work = plan_resume(out, job.manifest, "resume")
    schema = job.table.generated_schema
    from_before = failed_row(5, RowError("too_long", ""), GENERATE_TASK.failed_results)
    segments = Segments(out, work.manifest, work.todo, schema)
    segments.add(segment_table([from_before], segments.schema))

    def run(script: Script, size: FleetSize = ALONE) -> bool:
        recovered = recover_rows(out, work, schema)
        driver = FleetDriver(
            OutputJob(spec, source, job.table, job.manifest, out),
            recovered,
            script,
            size,
            run_number=1,
            clear=lambda: None,
            progress=make_progress(Meter(200), quiet=True),
            stop=Event(),
            clock=lambda: script.now,
        )
        return driver.run()

    return run


def test_a_job_whose_workers_are_gone_does_not_wait_for_ever(run: Callable[[Script], bool]) -> None:
    script = Script([up("w01"), Gone("w01", "its node is gone")])
    with pytest.raises(DeviceError, match=r"no worker has been up .* scale\.start_timeout"):
        run(script)
    assert 60 < script.now < 75
    assert script.given, "it had begun"


def test_rows_from_before_are_no_progress_of_workers_that_die(
    run: Callable[[Script], bool],
) -> None:
    events = [
        event
        for number in range(1, 40)
        for event in (up(f"w{number:02d}"), Gone(f"w{number:02d}", "it died"))
    ]
    with pytest.raises(DeviceError, match="workers die one after another"):
        run(Script(events))


@pytest.mark.parametrize("error", [DeviceError, StorageError])
def test_what_may_be_one_nodes_fault_ends_its_worker_and_not_the_job(
    run: Callable[[Script], bool], error: type[JobError]
) -> None:
    """A device that broke, a scratch disk that is full; nobody comes up there again."""
    script = Script(
        [
            *(up("w01", "a bad node"), up("w02")),
            *(failed("w01", error.__name__, "the first"), Gone("w01", "it was ended")),
            failed("w02", error.__name__, "another one"),
        ]
    )
    with pytest.raises(error, match="another one"):  # nobody is left
        run(script)
    assert script.killed == ["w01"]
    assert script.avoided == [frozenset(), {"a bad node"}]


def test_the_worker_that_the_job_failed_of_is_named_in_the_status(
    tmp_path: Path, run: Callable[[Script], bool]
) -> None:
    out = output_at(str(tmp_path / "out"))
    out.files.make_directory(out.runs)
    for worker in ("w01", "w02"):
        record = Run(f"run-00001-{worker}", {}, saved_at=1.0, ended=True)
        out.write_json(out.runs / f"{record.run_id}.json", asdict(record))
    script = Script(
        [
            *(up("w01"), up("w02")),
            *(failed("w01", "DeviceError", "the first"), Gone("w01", "it was ended")),
            failed("w02", "DeviceError", "another one"),
        ]
    )
    with pytest.raises(DeviceError, match="another one"):
        run(script)
    found = read_status(out, time.time())
    assert found.error == "w02 failed: another one", "others went on for the first"
    assert [worker.state for worker in found.workers] == ["ended", "failed"]


def test_what_may_be_one_nodes_fault_does_not_end_a_job_whose_others_are_still_to_come(
    run: Callable[..., bool],
) -> None:
    """Those that are to come in the place of such are no others."""
    script = Script(
        [
            *(up("w01", "a bad node"), failed("w01", "DeviceError", "the first")),
            *(Gone("w01", "it was ended"), up("w02"), failed("w02", "DeviceError", "another one")),
            Gone("w02", "it was ended"),
        ]
    )
    with pytest.raises(DeviceError, match="another one"):
        run(script, FleetSize(2, start_timeout_s=60.0))
    assert script.started == ["w01", "w02", "w03"]


def test_what_workers_died_of_outlives_their_driver(
    run: Callable[[Script], bool], tmp_path: Path
) -> None:
    out = output_at(str(tmp_path / "out"))
    in_flight = {"run-00001-w01": [3, 4, 70], "run-00001-w02": [4, 70, 71]}

    def begin_log(run_id: str) -> None:
        row_ids = np.array(in_flight.get(run_id, []), LOG_ENTRY)
        out.write(out.in_flight / run_id, row_ids.tobytes())

    deaths = [up("w01"), Gone("w01", "it died"), up("w02"), Gone("w02", "it died")]
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(Script(deaths, on_start=begin_log))
    found = attribute_crashes(out, [range(200)])
    assert found.groups == ((4,), (70,)), "in flight at both deaths"
    assert found.in_flight == (3, 71)
    script = Script([up("w01"), Gone("w01", "it is over")])
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script)
    shares = script.given[0].lease.shares
    assert [share.rows for share in shares] == [(range(4, 5),)], "it runs apart"


def test_rows_that_ran_when_their_cluster_was_lost_are_not_blamed(
    run: Callable[[Script], bool], tmp_path: Path
) -> None:
    """All workers go with it, those too that were to come, and others come in their place."""
    out = output_at(str(tmp_path / "out"))

    def begin_log(run_id: str) -> None:
        out.write(out.in_flight / run_id, np.array([3, 4], LOG_ENTRY).tobytes())

    lost = [up("w01"), Lost("no daemon"), up("w02"), Lost("no daemon"), Lost("no daemon")]
    script = Script(lost, on_start=begin_log)
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script)
    assert script.started == ["w01", "w02", "w03", "w04"]
    assert not attribute_crashes(out, [range(200)]).groups


def test_a_cluster_of_many_workers_is_begun_again_though_none_had_finished_a_row(
    run: Callable[..., bool],
) -> None:
    names = [f"w{number:02d}" for number in range(1, 9)]
    script = Script([*map(up, names), Lost("no daemon")])
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script, FleetSize(8, start_timeout_s=60.0))
    assert len(script.started) == 16


def test_clusters_that_are_lost_one_after_another_end_the_job(run: Callable[..., bool]) -> None:
    names = [f"w{number:02d}" for number in range(1, 100)]
    lost = [[up(one), up(other), Lost("no daemon")] for one, other in pairwise(names)]
    script = Script([event for events in lost[::2] for event in events])
    with pytest.raises(DeviceError, match="workers die one after another"):
        run(script, FleetSize(2, start_timeout_s=60.0))


def test_workers_are_not_silent_while_nobody_hears_them(run: Callable[[Script], bool]) -> None:
    script = Script([up("w01"), *(Unheard(1.0) for _ in range(40)), Gone("w01", "it died")])
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script)
    assert not script.killed


def test_what_all_would_meet_ends_the_job(run: Callable[[Script], bool]) -> None:
    script = Script([up("w01"), up("w02"), failed("w01", "ModelError", "no such layer")])
    with pytest.raises(ModelError, match="no such layer"):
        run(script)


def test_a_broken_node_is_better_than_none(run: Callable[[Script], bool]) -> None:
    script = Script(
        [
            *(up("w01", "a bad node"), up("w02")),
            *(failed("w01", "DeviceError", "it broke"), Gone("w01", "it was ended")),
            Gone("w02", "its node is gone"),
        ]
    )
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script)
    assert script.avoided == [frozenset(), {"a bad node"}, frozenset()]


def test_workers_that_cannot_be_started_end_the_job_as_what_they_met(
    run: Callable[[Script], bool],
) -> None:
    broken = Failure("ModelError", "model.safetensors is cut short")
    script = Script([NotUp("w01", "a node", broken), NotUp("w02", "a node", broken)])
    with pytest.raises(ModelError, match=r"no worker could be started: .* is cut short"):
        run(script)


def test_the_only_node_is_tried_again_whatever_has_failed_there(
    run: Callable[..., bool],
) -> None:
    """Where it was left out, a worker would wait for another one without end."""
    broken, only = Failure("ModelError", "no memory for two"), frozenset({"a node"})
    script = Script(
        [
            *(up("w01"), *(NotUp(name, "a node", broken, only) for name in ("w02", "w03"))),
            *(Gone("w01", "it died"), NotUp("w04", "a node", broken, only)),
        ]
    )
    with pytest.raises(ModelError, match="no worker could be started: no memory for two"):
        run(script, FleetSize(2, start_timeout_s=60.0))
    assert script.avoided == [frozenset()] * 4


@pytest.mark.parametrize("nodes", ["one one other other", "? ? ? ?", "? one ? one"])
def test_a_worker_is_tried_on_every_node_before_there_is_none(
    run: Callable[..., bool], nodes: str
) -> None:
    """Where it was is not always known."""
    broken, both = Failure("ModelError", "no such file"), frozenset({"one", "other"})
    ended = [NotUp(f"w{at:02d}", node, broken, both) for at, node in enumerate(nodes.split(), 1)]
    script = Script([*ended, *(NotUp(f"w{at}", "?", broken, both) for at in range(10, 20))])
    with pytest.raises(ModelError, match="no worker could be started: no such file"):
        run(script)
    assert len(script.started) == len(ended)
    assert ("one" in script.avoided[-1]) == (nodes == "one one other other")


def test_a_node_where_none_comes_up_is_left_out_whatever_comes_up_elsewhere(
    run: Callable[[Script], bool],
) -> None:
    broken = Failure("", "no driver")
    script = Script(
        [
            *(NotUp("w01", "a bad node", broken), up("w02"), NotUp("w03", "a bad node", broken)),
            Gone("w02", "its node is gone"),
        ]
    )
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script)
    assert script.avoided[-1] == {"a bad node"}


def test_a_worker_that_has_found_other_kernels_than_the_first_is_started_again(
    run: Callable[..., bool],
) -> None:
    mine, other = Ready("host", "cpu", {"float32": "a"}), Ready("host", "cpu", {"float32": "b"})
    script = Script(
        [
            *(Up("w01", "a node", mine), Up("w02", "a node", other), Gone("w02", "it was ended")),
            Up("w03", "a node", other),  # it was told, and cannot do as it was told
            *(Gone("w01", "it died"), Gone("w03", "it died")),
        ]
    )
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script, FleetSize(2, start_timeout_s=60.0, same_kernels=True))
    assert script.kernels == [mine.kernels]
    assert script.killed == ["w02"]
    assert {given.lease.worker for given in script.given} == {"w01", "w03"}
    assert script.started[:3] == ["w01", "w02", "w03"]


@pytest.mark.parametrize("access", ["disk", "store"])
def test_all_rows_of_a_worker_whose_log_is_behind_may_be_what_it_died_of(
    run: Callable[[Script], bool], access: Access
) -> None:
    events = [
        event
        for worker in ("w01", "w02", "w03")
        for event in (up(worker, access=access), Gone(worker, "it died"))
    ]
    script = Script(events)
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script)
    rows = {
        worker: sum(given.lease.num_rows for given in script.given if given.lease.worker == worker)
        for worker in ("w01", "w03")
    }
    assert (rows["w03"] < rows["w01"]) == (access != "disk"), "suspects run by halves"
