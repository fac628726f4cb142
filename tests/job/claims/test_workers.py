"""Several workers that claim the parts of a job, with real files, locks and processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from batchinfer.console.meter import Meter
from batchinfer.console.progress_bar import Progress
from batchinfer.console.text_view import Display
from batchinfer.errors import ExitCode, LockedError, StorageError
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role, SharedClaim
from batchinfer.job.claims.worker_queue import claim_size
from batchinfer.job.output.commit import Draft
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.row_ranges import Part
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.failpoints import VARIABLE
from tests.job.claims.jobs import NUM_ROWS, check_finished, data
from tests.job.fakes import FakeBuild
from tests.job.stores import LAKE, environment, point_to, s3_server


class MeterDisplay(Display):
    """Shows nothing, but keeps the run's meter."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def progress(self, meter: Meter) -> Progress:
        self.meter = meter
        return super().progress(meter)


def work(
    spec: JobSpec, build: FakeBuild | None = None, display: Display | None = None, **role: Any
) -> ExitCode:
    """Run a worker in this process."""
    role = Role(is_worker=True, **role)
    return run_job(spec, role=role, build=build or FakeBuild(), display=display, quiet=True)


def begun(spec: JobSpec, *options: str, **environ: str) -> subprocess.Popen[str]:
    """Start a worker in its own process."""
    folder = str(Path(spec.output.path).parent)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.job.claims.program", folder, "worker", *options],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def parts(count: int) -> list[Part]:
    return [Part(at, range(at * 10, at * 10 + 10)) for at in range(count)]


def test_claim_size_falls_from_a_window_to_single_parts() -> None:
    free, sizes = parts(800), list[int]()
    while free:
        size = claim_size(free, num_workers=4, window_rows=160)
        sizes.append(size)
        free = free[size:]
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-24:] == [1] * 24
    assert claim_size(parts(3), 8, 5) == 1, "a claim has at least one part"
    assert claim_size([], 8, 160) == 0


def test_single_worker_writes_the_bytes_of_a_run(spec: JobSpec, plain: dict[str, bytes]) -> None:
    assert work(spec) is ExitCode.OK
    check_finished(spec, plain)
    again = FakeBuild()
    assert work(spec, again) is ExitCode.OK
    assert again.count == 0, "nothing is left to do"


def test_workers_share_the_parts_and_one_ends_the_job(
    spec: JobSpec, plain: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each worker waits before its first step until both have claimed parts."""
    both, codes, builds = threading.Barrier(2), list[ExitCode](), [FakeBuild(), FakeBuild()]
    displays = [MeterDisplay(), MeterDisplay()]
    for build in builds:
        build.before_step = lambda number: both.wait(60) if number == 0 else None

    def run(build: FakeBuild, display: Display) -> None:
        codes.append(work(spec, build, display))

    threads = [
        threading.Thread(target=run, args=pair) for pair in zip(builds, displays, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [ExitCode.OK] * 2
    check_finished(spec, plain)
    out = output_at(spec.output.path)
    summary = json.loads(Path(out.summary).read_bytes())
    assert (summary["rows"]["total"], summary["workers"]) == (NUM_ROWS, 2)
    first, second = (display.meter for display in displays)
    assert first.rows_finished + second.rows_finished == NUM_ROWS
    for meter in (first, second):  # each progress bar counts all rows of the job
        assert (meter.before + meter.total, meter.rows_finished) == (NUM_ROWS, meter.total)


@pytest.mark.parametrize(
    "point", ["claims-durable:2", "segments-durable:2", "data-renamed:1", "parts-durable:2"]
)
def test_parts_of_a_killed_worker_are_made_by_another(
    spec: JobSpec, plain: dict[str, bytes], point: str
) -> None:
    dead = begun(spec, **{VARIABLE: point})
    dead.communicate()
    assert dead.returncode == -signal.SIGKILL
    assert work(spec) is ExitCode.OK
    check_finished(spec, plain)


def test_workers_resume_after_three_are_killed(spec: JobSpec, plain: dict[str, bytes]) -> None:
    killed = [begun(spec, f"{step}=SIGKILL") for step in (3, 9, 14)]
    codes = [process.wait() for process in killed]
    for process in killed:
        process.communicate()
    assert codes == [-signal.SIGKILL] * 3
    others = [begun(spec) for _ in range(2)]
    assert [process.communicate() and process.returncode for process in others] == [0, 0]
    check_finished(spec, plain)


def test_thawed_worker_publishes_nothing(spec: JobSpec, plain: dict[str, bytes]) -> None:
    frozen = begun(spec, "freezes=yes")
    os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOWAIT)
    other = begun(spec, "lapse=-1")
    out, _ = other.communicate()
    assert other.returncode == 0, out
    assert data(spec) == plain
    before = {path.name: path.stat().st_mtime_ns for path in Path(spec.output.path).rglob("part-*")}
    frozen.send_signal(signal.SIGCONT)
    out, _ = frozen.communicate()
    assert (frozen.returncode, "other processes have taken over" in out) == (7, True), out
    after = {path.name: path.stat().st_mtime_ns for path in Path(spec.output.path).rglob("part-*")}
    assert before == after
    assert verify(output_at(spec.output.path)).problems == []


def test_worker_that_cannot_write_does_not_wait_for_other_workers(
    spec: JobSpec, plain: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part that the worker can claim is not written, while another worker is stopped."""
    stopped = begun(spec, "freezes=yes")
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    claims = json.loads(Path(spec.output.path, "_batchinfer", "claims", "w01.json").read_bytes())
    num_free = 8 - sum(stop - start for start, stop in claims["parts"])
    publish, published = SharedClaim.publish, itertools.count(1)

    def publish_or_fail(claim: SharedClaim, part: Part, draft: Draft) -> None:
        if next(published) == num_free:
            raise StorageError("the disk is full")
        publish(claim, part, draft)

    with monkeypatch.context() as patch:
        patch.setattr(SharedClaim, "publish", publish_or_fail)
        with pytest.raises(StorageError, match="the disk is full"):
            work(spec)
    stopped.send_signal(signal.SIGCONT)
    stopped.communicate()
    assert stopped.returncode == 0
    check_finished(spec, plain)


@pytest.mark.long
def test_crash_row_of_a_worker_is_given_up(spec: JobSpec) -> None:
    deaths = 0
    while (process := begun(spec, **{VARIABLE: "row-37:1"})).wait() == -signal.SIGKILL:
        process.communicate()
        deaths += 1
    process.communicate()
    assert process.returncode == ExitCode.TOO_MANY_ROW_ERRORS
    assert deaths <= 12  # far fewer than there are rows
    out = output_at(spec.output.path)
    found = out.read_table(Path(out.data) / "part-00003.parquet").to_pylist()
    assert [row["row_id"] for row in found if row["status"] == "error"] == [37]
    assert json.loads(Path(out.summary).read_bytes())["rows"]["error"] == 1


def test_worker_of_a_shard_makes_only_the_parts_of_the_shard(
    spec: JobSpec, plain: dict[str, bytes]
) -> None:
    assert work(spec, shard=Shard(1, 2)) is ExitCode.OK
    assert sorted(data(spec)) == [f"part-{at:05d}.parquet" for at in range(4, 8)]
    assert run_job(spec, role=Role(Shard(0, 2)), build=FakeBuild(), quiet=True) is ExitCode.OK
    check_finished(spec, plain)


def test_other_writers_are_refused_while_a_worker_runs(spec: JobSpec) -> None:
    refused: list[str] = []

    def begin_others(number: int) -> None:
        if number == 0:
            for role in (None, Role(Shard(0, 2))):
                with pytest.raises(LockedError) as error:
                    run_job(spec, role=role, build=FakeBuild(), quiet=True)
                refused.append(str(error.value))

    build = FakeBuild()
    build.before_step = begin_others
    assert work(spec, build) is ExitCode.OK
    # The refused run finds either the lock of the worker or the lock of the directory.
    assert all("is writing to" in line for line in refused)


def test_failed_rows_are_not_retried_while_a_worker_of_another_run_lives(spec: JobSpec) -> None:
    refused: list[str] = []

    def retry(number: int) -> None:
        if number == 0:
            with pytest.raises(LockedError) as error:
                run_job(spec, retry_errors=True, fleet=lambda *_: True, quiet=True)
            refused.append(str(error.value))

    build = FakeBuild()
    build.before_step = retry
    assert work(spec, build) is ExitCode.OK
    assert "failed rows cannot run again while" in refused[0]


@pytest.mark.long
def test_workers_in_a_store(
    spec: JobSpec, tmp_path: Path, plain: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as address:
        point_to(address, monkeypatch)
        path = f"{LAKE}/workers/out"
        dead = begun(spec, f"path={path}", "8=SIGKILL", **environment(address))
        dead.communicate()
        assert dead.returncode == -signal.SIGKILL
        others = [begun(spec, f"path={path}", **environment(address)) for _ in range(2)]
        said = [process.communicate()[0] for process in others]
        assert [process.returncode for process in others] == [0, 0], said
        out = output_at(path)
        found = verify(out)
        assert (found.problems, found.complete) == ([], True)
        made = {one.name: out.files.open(one).read() for one in out.files.entries(out.data)}
        assert made == plain
