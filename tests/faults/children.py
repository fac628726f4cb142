"""Runs of a job in processes that may be killed.

The processes are forked from one that has imported everything and run nothing, so that a run
begins at once. Whoever uses this must be such a process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import JobError
from batchinfer.job.claims.shared import Role
from batchinfer.job.output import part_writer
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.run.run import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage.failpoints import VARIABLE
from batchinfer.job.storage.filesystem import LocalFiles
from batchinfer.job.storage.object_filesystem import StoreFiles

KILLED = -signal.SIGKILL
BuildEngine = Callable[..., object]


@dataclass(frozen=True)
class Pace:
    """How often finished rows go to disk."""

    every_s: float
    rows: int


@dataclass
class Child:
    """A process that runs a job."""

    pid: int
    log: Path

    def kill_after(self, seconds: float) -> int:
        """Kill it unless it ends by itself before that; its exit status."""
        return self.signal_after(seconds, signal.SIGKILL)[0]

    def signal_after(self, seconds: float, number: signal.Signals) -> tuple[int, float]:
        """Send a signal unless it ends by itself before that.

        Returns:
            Its exit status, and the seconds from the signal to its end.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status), 0.0
            time.sleep(0.002)
        os.kill(self.pid, number)
        sent = time.monotonic()
        return self.wait(), time.monotonic() - sent

    def has_ended(self) -> bool:
        """Whether it has; ``wait`` still tells how."""
        seen = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, seen) is not None

    def wait(self) -> int:
        """Its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start(
    spec: JobSpec,
    build: BuildEngine | None,
    pace: Pace,
    folder: Path,
    failpoint: str = "",
    around: Callable[[], None] = lambda: None,
    *,
    retry_errors: bool = False,
    update: bool = False,
    role: Role | None = None,
) -> Child:
    """Run a job in a process of its own.

    Args:
        spec: the job.
        build: makes the engine; None: the real one.
        pace: in place of the places' ``flush_every_s`` and ``sink.FLUSH_ROWS``.
        folder: for the process's output, and for ``finished``: a line for each row as it finishes,
            with the time.
        failpoint: where it kills itself.
        around: called in the process first.
        retry_errors: run the rows again that ended in an error.
        update: make anew what differs from the output there is.
        role: what it makes beside others.
    """
    log = folder / "log"
    # What is sent to a process that has not come to ``around`` yet waits for what that says of it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Child(pid, log)
    code = 99
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ[VARIABLE] = failpoint
        LocalFiles.flush_every_s = StoreFiles.flush_every_s = pace.every_s
        part_writer.FLUSH_ROWS = pace.rows
        _tell_finished(folder / "finished")
        around()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        options = {"quiet": True, "retry_errors": retry_errors, "update": update, "role": role}
        code = int(run_job(spec, build=build, **options))  # type: ignore[arg-type]
    except JobError as error:
        print(error)
        code = int(error.exit_code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell_finished(path: Path) -> None:
    add = PartWriter.add
    file = path.open("ab", buffering=0)

    def add_and_tell(self: PartWriter, row: FinishedRow) -> None:
        file.write(b"%d %f\n" % (row.values["row_id"], time.monotonic()))
        add(self, row)

    PartWriter.add = add_and_tell  # type: ignore[method-assign]
