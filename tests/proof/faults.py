"""The faults of the matrix. Each strikes a job, checks that it has struck, and lets the job end.

In schedules with two workers, faults strike the first worker, unless they say otherwise.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

from batchinfer.errors import ExitCode
from batchinfer.job.storage import connection
from batchinfer.process.process import leave_on_signals
from tests.faults.allocator import Allocator
from tests.faults.kills import KILLED
from tests.proof.jobs import NUM_ROWS
from tests.proof.runs import LIMIT_S, Runs, StuckError, at_failpoint, expect

_FAILS_AT = (60, 100)
"""Numbers of torch's operations that fail, counted over all steps from 0."""
_POISON = 7
"""The row that kills the process."""
_MOST_DEATHS = 24
_DISK_BYTES = 1000
"""Larger than any log, smaller than any part."""
_MOST_WAIT_S = 60.0


@dataclass(frozen=True)
class Fault:
    """A fault and the way to cause it."""

    means: str
    strike: Callable[[Runs], None]
    """Runs the job, causes the fault, and runs the job again until it has ended."""
    in_store: bool = False
    """True if the job writes its output to an object store."""


def _kill(failpoint: str) -> Callable[[Runs], None]:
    def strike(runs: Runs) -> None:
        expect(runs.run(failpoint=failpoint, hold=True), KILLED)
        runs.finish()

    return strike


def _stop(runs: Runs) -> None:
    def prepare() -> None:
        leave_on_signals()
        at_failpoint("parts-durable", 1, partial(os.kill, os.getpid(), signal.SIGTERM))()

    expect(runs.run(prepare, hold=True), ExitCode.INTERRUPTED)
    runs.finish()


def _fill_disk(runs: Runs) -> None:
    """Let no file grow beyond ``_DISK_BYTES`` once the first finished rows are stored."""
    limit = partial(
        resource.setrlimit, resource.RLIMIT_FSIZE, (_DISK_BYTES, resource.RLIM_INFINITY)
    )
    expect(runs.run(at_failpoint("segments-durable", 1, limit), hold=True), ExitCode.STORAGE)
    runs.finish()


def _fail_to_sync(runs: Runs) -> None:
    def fail(descriptor: int) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def break_fsync() -> None:
        os.fsync = fail

    expect(runs.run(at_failpoint("segments-durable", 1, break_fsync), hold=True), ExitCode.STORAGE)
    runs.finish()


def _disturb_store(runs: Runs) -> None:
    """Kill a run whose store answers one of three requests with 503."""

    def retry_soon() -> None:
        pause = timedelta(milliseconds=1)
        backoff = {"init_backoff": pause, "max_backoff": 5 * pause}
        retry = {"max_retries": 9, "retry_timeout": timedelta(seconds=60), "backoff": backoff}
        connection.RETRY = retry  # type: ignore[assignment]

    expect(runs.run(retry_soon, failpoint="parts-durable:1", hold=True), KILLED)
    expect(runs.run(retry_soon), ExitCode.OK)


def _kill_worker(runs: Runs) -> None:
    """Kill one of two workers and let the other one finish; if there is one process, kill the
    processes that prepare its text."""
    if runs.num_workers > 1:
        expect(runs.run(failpoint="parts-durable:1", hold=True), KILLED)
        expect(runs.codes[-1], ExitCode.OK)
        return
    expect(runs.run(at_failpoint("segments-durable", 1, _kill_text_processes)), ExitCode.OK)


def _kill_text_processes() -> None:
    """Kill all descendants of this process."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(fields[1])
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() != pid:
            os.kill(pid, signal.SIGKILL)


def _kill_driver(runs: Runs) -> None:
    """Kill the launcher of two workers, and run again; if there is one process, kill it in the
    middle of its work."""
    if runs.num_workers == 1:
        expect(runs.run(failpoint=f"row-{NUM_ROWS // 2}:1"), KILLED)
        runs.finish()
        return
    job = runs.folder / "job.yaml"
    job.write_text(runs.spec.model_dump_json(exclude_unset=True))  # JSON is YAML
    command = [sys.executable, "-m", "batchinfer", "run", str(job), "--quiet", "--no-report"]
    command += ["--workers", str(runs.num_workers)]
    with (runs.folder / "log").open("a") as log:
        records = Path(runs.spec.output.path) / "_batchinfer" / "parts"
        launcher = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + _MOST_WAIT_S
        while not any(records.glob("*")) and time.monotonic() < until:
            time.sleep(0.005)
        launcher.kill()
        expect(launcher.wait(), KILLED)
        runs.codes.append(KILLED)
        try:
            done = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise StuckError(f"the second launcher did not end within {LIMIT_S:.0f} s") from error
    runs.codes.append(done.returncode)
    expect(done.returncode, ExitCode.OK)


def _flip(folder: str, failpoint: str) -> Callable[[Runs], None]:
    """Return a fault that kills all processes of a run, and flips a bit in the middle of each file
    of a folder."""

    def strike(runs: Runs) -> None:
        expect(runs.run(failpoint=failpoint, everywhere=True), KILLED)
        names = runs.files(folder)
        if not names:
            raise StuckError(f"no file in {folder} to damage")
        for name, data in names.items():
            middle = len(data) // 2
            damaged = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            (Path(runs.spec.output.path) / name).write_bytes(damaged)
        runs.finish()

    return strike


def _exhaust_memory(runs: Runs) -> None:
    """Let two operations run out of memory. Only if a step cannot be made smaller, for example
    because a whole image must be in one step, may the run end; the next run then continues."""
    code = runs.run(Allocator(_FAILS_AT).watch_steps)
    expect(code, ExitCode.OK, ExitCode.DEVICE)
    if code == ExitCode.DEVICE:
        expect(runs.run(), ExitCode.OK)


def _poison(runs: Runs) -> None:
    """Kill each run that computes a certain row, until the job gives the row up; then retry it."""
    for _ in range(_MOST_DEATHS):
        code = runs.run(failpoint=f"row-{_POISON}:1", everywhere=True)
        if code != KILLED:
            break
    expect(code, ExitCode.TOO_MANY_ROW_ERRORS)
    expect(runs.run(retry_errors=True), ExitCode.OK)


FAULTS = {
    "kill-before-commit": Fault("kill -9 before a part is recorded", _kill("parts-staged:1")),
    "kill-after-commit": Fault("kill -9 after a part is recorded", _kill("parts-durable:1")),
    "sigterm": Fault("SIGTERM after the first part", _stop),
    "full-disk": Fault("no file can grow after the first finished rows", _fill_disk),
    "failing-fsync": Fault("fsync fails after the first finished rows", _fail_to_sync),
    "store-503": Fault(
        "the object store answers one of three requests with 503; kill -9 after a part",
        _disturb_store,
        in_store=True,
    ),
    "worker-killed": Fault(
        "kill -9 of one of two workers; with one process, of its text processes", _kill_worker
    ),
    "driver-killed": Fault(
        "kill -9 of the launcher of workers; with one process, of that process in mid-work",
        _kill_driver,
    ),
    "damaged-part": Fault(
        "a bit flips in each finished part after a kill -9", _flip("data/", "parts-durable:1")
    ),
    "damaged-tokens": Fault(
        "a bit flips in each file of unfinished rows' tokens after a kill -9",
        _flip("_batchinfer/tokens/", "tokens-durable:3"),
    ),
    "out-of-memory": Fault("two steps run out of memory", _exhaust_memory),
    "poison-row": Fault(
        "a row kills the process whenever it starts, until it is given up; then it is retried",
        _poison,
    ),
}
