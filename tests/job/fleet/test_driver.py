"""A fleet's driver beside workers that are told of, and never there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from batchinfer.console.progress import make_progress
from batchinfer.errors import DeviceError, RowError
from batchinfer.job.fleet.driver import FleetDriver, FleetSize, Gone, Told, Up, WorkerEvent
from batchinfer.job.fleet.messages import Answer, Assignment, Failure, Ready, WorkerReport
from batchinfer.job.job import OutputJob, open_input, open_job
from batchinfer.job.output.open import output_at
from batchinfer.job.output.resume import plan_resume, recover_rows
from batchinfer.job.output.segments import Segments, segment_table
from batchinfer.job.rows.finished_row import failed_row
from batchinfer.job.rows.generate import GENERATE_TASK
from tests.job.fakes import begin
from tests.job.fleet.jobs import fleet_job, write_rows

READY = Ready("host", "cpu", {})
ALONE = FleetSize(1, start_timeout_s=60.0)


@dataclass
class Script:
    """Workers of whom a list of events is told, a second apart, and nothing after that."""

    events: list[WorkerEvent]
    now: float = 0.0
    given: list[Assignment] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    kernels: list[Mapping[str, str]] = field(default_factory=list)

    def start(self, worker: str, run_id: str, avoid: frozenset[str]) -> None:
        self.started.append(worker)

    def use_kernels(self, kernels: Mapping[str, str]) -> None:
        self.kernels.append(kernels)

    def give(self, worker: str, assignment: Assignment) -> None:
        self.given.append(assignment)

    def take_back(self, worker: str, *, everything: bool) -> None: ...

    def supply(self, worker: str, answer: Answer) -> None: ...

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
    recovered = recover_rows(out, work, schema)

    def run(script: Script, size: FleetSize = ALONE) -> bool:
        driver = FleetDriver(
            OutputJob(spec, source, job.table, job.manifest, out),
            recovered,
            script,
            size,
            run_number=1,
            clear=lambda: None,
            progress=make_progress(200, quiet=True),
            stop=Event(),
            clock=lambda: script.now,
        )
        return driver.run()

    return run


def test_a_job_whose_workers_are_gone_does_not_wait_for_ever(run: Callable[[Script], bool]) -> None:
    script = Script([Up("w01", READY), Gone("w01", "its node is gone")])
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
        for event in (Up(f"w{number:02d}", READY), Gone(f"w{number:02d}", "it died"))
    ]
    with pytest.raises(DeviceError, match="workers die one after another"):
        run(Script(events))


def test_a_device_that_breaks_ends_its_worker_and_not_the_job(
    run: Callable[[Script], bool],
) -> None:
    broken = WorkerReport(failure=Failure("DeviceError", "an uncorrectable error"), is_over=True)
    last = WorkerReport(failure=Failure("DeviceError", "another one"), is_over=True)
    script = Script(
        [
            *(Up("w01", READY), Up("w02", READY)),
            *(Told("w01", broken), Gone("w01", "it was ended")),
            Told("w02", last),
        ]
    )
    with pytest.raises(DeviceError, match="another one"):  # nobody is left
        run(script)
    assert script.killed == ["w01"]


def test_a_worker_that_has_found_other_kernels_than_the_first_is_started_again(
    run: Callable[..., bool],
) -> None:
    mine, other = Ready("host", "cpu", {"float32": "a"}), Ready("host", "cpu", {"float32": "b"})
    script = Script(
        [
            *(Up("w01", mine), Up("w02", other), Gone("w02", "it was ended")),
            Up("w03", other),  # it was told, and cannot do as it was told
            *(Gone("w01", "it died"), Gone("w03", "it died")),
        ]
    )
    with pytest.raises(DeviceError, match="no worker has been up"):
        run(script, FleetSize(2, start_timeout_s=60.0, same_kernels=True))
    assert script.kernels == [mine.kernels]
    assert script.killed == ["w02"]
    assert {given.lease.worker for given in script.given} == {"w01", "w03"}
    assert script.started[:3] == ["w01", "w02", "w03"]
