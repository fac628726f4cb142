"""Kills runs of a job at failpoints or random times, and checks the output afterwards.

Each run is forked from a process that has imported all modules but has run no job, so that the run
starts at once. Outputs are read without batchinfer's code, because its threads do not survive a
fork.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import ExitCode, JobError
from batchinfer.job.claims import swap_generation
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.output import part_writer
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage import filesystem
from batchinfer.job.storage.failpoints import VARIABLE
from batchinfer.job.storage.filesystem import LocalFiles
from batchinfer.job.storage.object_filesystem import StoreFiles
from batchinfer.process.process import leave_on_signals
from tests.faults.violation import ViolationError
from tests.job.fleet.engines import log_finished_rows
from tests.job.stores import BUCKET, LAKE

KILLED = -signal.SIGKILL
LONG_S = 600.0
"""Seconds after which a run that is not killed counts as stuck."""
COMMITTED = ("runs", "steps", "segments", "requests", "data", "parts")
"""Folders whose files every run commits."""
STAGES = ("staged", "synced", "renamed", "durable")
_MOST_HELD_S = 120.0
BuildEngine = Callable[..., object]


@dataclass(frozen=True)
class Pace:
    """How often finished rows are written to disk."""

    every_s: float
    rows: int


@dataclass
class Child:
    """A process that runs a job."""

    pid: int

    def signal_after(self, seconds: float, number: signal.Signals) -> tuple[int, float]:
        """Send a signal after some seconds, unless the process ends before that.

        Returns:
            The process's exit status, and the seconds from the signal to the process's end.
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
        """Return True if the process has ended; ``wait`` still returns its exit status."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        """Wait for the end of the process and return its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start(
    spec: JobSpec,
    build: BuildEngine | None,
    pace: Pace,
    folder: Path,
    failpoint: str = "",
    prepare: Callable[[], None] = lambda: None,
    **options: Any,
) -> Child:
    """Run a job in a new process.

    Args:
        build: builds the engine; None: use the real engine.
        folder: where the process writes ``log``, and ``finished`` with a line for each finished
            row.
        failpoint: the failpoint at which the process kills itself.
        prepare: called in the new process before the job runs.
        options: further options of ``run_job``.
    """
    # SIGTERM waits until ``prepare`` has set its handler.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return Child(pid)
    code = 99
    try:
        with (folder / "log").open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ[VARIABLE] = failpoint
        LocalFiles.flush_every_s = StoreFiles.flush_every_s = pace.every_s
        part_writer.FLUSH_ROWS = pace.rows
        log_finished_rows(folder / "finished")
        prepare()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        code = int(run_job(spec, build=build, quiet=True, **options))  # type: ignore[arg-type]
    except JobError as error:
        print(error)
        code = int(error.exit_code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class InFolder:
    """Output directories on this machine."""

    def begin(self, place: Path) -> None:
        """Use a new output directory in the folder ``place``."""
        self.path = str(place / "out")

    def files(self) -> dict[str, bytes]:
        """Return the content of all files by relative path, sorted by path."""
        root = Path(self.path)
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}


class InBucket:
    """Output directories in an object store."""

    def __init__(self, address: str) -> None:
        self._client = boto3.client("s3", endpoint_url=address)
        self._count = 0

    def begin(self, place: Path) -> None:
        self._count += 1
        # Failpoint names contain the output folder's name, so all jobs use the name ``out``.
        self._key = f"killed/{self._count}/out/"
        self.path = f"{LAKE}/{self._key}"

    def files(self) -> dict[str, bytes]:
        listed = self._client.list_objects_v2(Bucket=BUCKET, Prefix=self._key).get("Contents", [])
        keys = [entry["Key"] for entry in listed]
        return {
            key.removeprefix(self._key): self._client.get_object(Bucket=BUCKET, Key=key)[
                "Body"
            ].read()
            for key in keys
        }


@dataclass
class Outcome:
    """Results of all kills."""

    kills: int = 0
    jobs: int = 0
    again_s: list[float] = field(default_factory=list)
    """For each kill, the age in seconds of the oldest finished row that it lost."""
    rows_again: int = 0
    """Number of finished rows that kills lost."""
    given_up: int = 0
    """Number of rows with ``crashed_engine``, because runs died before they finished a row."""


@dataclass
class Killer:
    """Runs and kills one job again and again, each time in a new folder.

    Args:
        folder: folder of all runs.
        spec: the job; its output path is replaced.
        build: builds the engine; None: use the real engine.
        output: where the output goes.
        role: the process's role, such as a shard; None: the process computes the whole job.
        finished: a finished output that each job updates; None: jobs start without output.
    """

    folder: Path
    spec: JobSpec
    build: BuildEngine | None
    pace: Pace
    output: InFolder | InBucket = field(default_factory=InFolder)
    role: Role | None = None
    finished: Path | None = None

    def __post_init__(self) -> None:
        self.outcome = Outcome()
        self.parts: dict[str, bytes] = {}
        """Parts of a run without kills."""
        self.seconds = 0.0
        """Duration of the run without kills, in seconds."""
        self._reached: Counter[str] = Counter()
        self._place = self.folder
        self._count = 0

    def run_unbroken(self) -> None:
        """Run the job without kills; record its parts and the failpoints that it reaches."""
        finished, self.finished = self.finished, None
        self._run_counting()
        self.parts = self.read_parts()
        if finished is not None:
            self.finished = finished
            self._run_counting()
            if self.read_parts() != self.parts:
                raise ViolationError("the updated output differs from a new output")

    def points(self) -> dict[str, list[str]]:
        """Return, for each failpoint, the first, a middle and the last time that it is reached, as
        ``NAME:COUNT``."""
        times = {name: {1, (last + 1) // 2, last} for name, last in self._reached.items()}
        return {name: [f"{name}:{at}" for at in sorted(times[name])] for name in sorted(times)}

    def kill_at_random(self, kills: int, random: Random, earliest: float, latest: float) -> None:
        """Kill jobs a random time after the start of each run; finish the last job."""
        while self.outcome.kills < kills:
            self._begin()
            code = KILLED
            while code == KILLED:
                is_last = self.outcome.kills >= kills
                code = self._run(LONG_S if is_last else random.uniform(earliest, latest))
            self._check(code)

    def kill_at(self, failpoint: str, random: Random) -> None:
        """Kill a job at a failpoint, kill the next run at a random time, then finish the job."""
        self._begin()
        self._expect(self._run(LONG_S, failpoint, update=True), KILLED)
        self._run(random.uniform(0.02, 0.6) * self.seconds, update=self._may_update(random))
        self._check(self._run(LONG_S, update=self._may_update(random)))

    def stop_at_random(self, stops: int, random: Random) -> list[float]:
        """Stop jobs with SIGTERM at random times, and finish each job.

        Returns:
            Seconds from each signal to the end of the process.
        """
        waited: list[float] = []
        while len(waited) < stops:
            self._begin()
            child = self._start(prepare=leave_on_signals)
            at = random.uniform(0.0, 0.95) * self.seconds
            code, seconds = child.signal_after(at, signal.SIGTERM)
            if code == ExitCode.INTERRUPTED:
                waited.append(seconds)
            else:
                self._expect(code, ExitCode.OK)
            self._check(self._run(LONG_S))
        return waited

    def race(self) -> list[int]:
        """Start two runs of one job at once; return their sorted exit statuses.

        The run that writes the first part waits until the other run has ended. Otherwise the other
        run might start late and find nothing to do.
        """
        self._begin()
        release = self._place / "release"
        prepare = partial(hold_at, "data-staged", release)
        runs = [self._start(prepare=prepare), self._start(prepare=prepare)]
        until = time.monotonic() + _MOST_HELD_S
        while not any(run.has_ended() for run in runs) and time.monotonic() < until:
            time.sleep(0.002)
        release.touch()
        codes = sorted(run.wait() for run in runs)
        (self._place / "finished").unlink()  # both runs have written to it
        self._check(self._run(LONG_S))
        return codes

    def run_until_done(self, failpoint: str, most: int) -> int:
        """Kill a job's runs at ``failpoint`` until one is not killed; return its exit status."""
        self._begin()
        for _ in range(most):
            code = self._run(LONG_S, failpoint)
            if code != KILLED:
                return code
        raise ViolationError(f"still dies after {most} runs")

    def rows(self) -> list[dict[str, Any]]:
        """Read the output of the latest job."""
        parts = self.read_parts().values()
        tables = [pq.ParquetFile(BytesIO(part)).read(use_threads=False) for part in parts]
        rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
        return rows

    def read_parts(self) -> dict[str, bytes]:
        """Read the parts of the latest job, keyed by name."""
        files = self.output.files()
        return {name: data for name, data in files.items() if name.startswith("data/")}

    def _begin(self) -> None:
        if self._count:
            shutil.rmtree(self._place)
        self._count += 1
        self._place = self.folder / str(self._count)
        self._place.mkdir()
        self.output.begin(self._place)
        if self.finished is not None:
            shutil.copytree(self.finished, self.output.path)

    def _start(self, failpoint: str = "", **options: Any) -> Child:
        output = self.spec.output.model_copy(update={"path": self.output.path})
        job = self.spec.model_copy(update={"output": output})
        options = {"role": self.role, **options}
        return start(job, self.build, self.pace, self._place, failpoint, **options)

    def _run_counting(self) -> None:
        self._begin()
        names = self._place / "names"
        began = time.monotonic()
        child = self._start(prepare=partial(_log_failpoints, names), update=bool(self.finished))
        self._expect(child.wait(), ExitCode.OK)
        self.seconds = time.monotonic() - began
        self._reached = Counter(names.read_text().split())

    def _run(self, kill_after_s: float, failpoint: str = "", *, update: bool = False) -> int:
        before = self._rows_on_disk()
        log = self._place / "finished"
        log.unlink(missing_ok=True)
        child = self._start(failpoint, update=update and self.finished is not None)
        code, _ = child.signal_after(kill_after_s, signal.SIGKILL)
        self._note(code, before, log)
        return code

    def _note(self, code: int, before: set[int], log: Path) -> None:
        """Check that no row of ``before`` ran again, and count the rows that the kill lost."""
        ended = time.monotonic()
        lines = log.read_text().splitlines() if log.exists() else []
        finished = {int(row): float(at) for row, at in map(str.split, lines)}
        if before & finished.keys():
            raise ViolationError(f"rows {sorted(before & finished.keys())} ran again")
        if code != KILLED:
            return
        self.outcome.kills += 1
        on_disk = self._rows_on_disk()
        lost = [at for row, at in finished.items() if row not in on_disk]
        self.outcome.rows_again += len(lost)
        self.outcome.again_s.append(ended - min(lost, default=ended))
        if self.finished is not None:
            self._check_one_generation()

    def _rows_on_disk(self) -> set[int]:
        """Return the rows in finished parts and segments; for an update, none."""
        files = self.output.files()
        if self.finished is not None or "_batchinfer/manifest.json" not in files:
            return set()
        plan = json.loads(files["_batchinfer/manifest.json"])
        rows_per_part = plan["rows_per_part"]
        rows: set[int] = set()
        for name, data in files.items():
            if record := re.fullmatch(r"_batchinfer/parts/part-(\d+)\.json", name):
                first = int(record.group(1)) * rows_per_part
                rows |= set(range(first, min(first + rows_per_part, plan["num_rows"])))
            elif name.startswith("_batchinfer/segments/"):
                table = pq.ParquetFile(BytesIO(data)).read(["row_id"], use_threads=False)
                rows |= set(table["row_id"].to_pylist())
        return rows

    def _may_update(self, random: Random) -> bool:
        """Return True if no update has begun; otherwise choose at random, because an update that
        has begun continues with or without ``--update``."""
        pattern = r"_batchinfer/next/[^/]+/_batchinfer/manifest.*\.json"
        has_begun = any(re.fullmatch(pattern, name) for name in self.output.files())
        return not has_begun or random.random() < 0.5

    def _check_one_generation(self) -> None:
        """Check that there is ``_SUCCESS`` with parts of one generation, or a swap's record."""
        assert self.finished is not None
        files = self.output.files()
        old = {p.name: p.read_bytes() for p in (self.finished / "data").iterdir()}
        generations = ({f"data/{name}": data for name, data in old.items()}, self.parts)
        if "_SUCCESS" in files and self.read_parts() not in generations:
            raise ViolationError("an output with _SUCCESS has files of two generations")
        if "_SUCCESS" not in files and "_batchinfer/swap.json" not in files:
            raise ViolationError("_SUCCESS is gone, and no record announces a swap")

    def _check(self, code: int) -> None:
        self._expect(code, ExitCode.OK)
        self._retry_given_up()
        if self.read_parts() != self.parts:
            raise ViolationError(f"{self.output.path} differs from the output without kills")
        if self.finished is not None:
            out = Path(self.output.path)
            if problems := verify(OutputDir(out)).problems:
                raise ViolationError(problems[0])
            for name in ("next", "swap.json"):
                if (out / "_batchinfer" / name).exists():
                    raise ViolationError(f"the update has left {name}")
        self.outcome.jobs += 1

    def _retry_given_up(self) -> None:
        """Run rows with ``crashed_engine`` again, without kills."""
        errors = [row["error"]["code"] for row in self.rows() if row["error"]]
        if given_up := errors.count("crashed_engine"):
            self.outcome.given_up += given_up
            self._expect(self._start(retry_errors=True).wait(), ExitCode.OK)

    def _expect(self, code: int, expected: int) -> None:
        if code != expected:
            log = (self._place / "log").read_text()
            raise ViolationError(f"exit {code}, not {expected}:\n{log}")


def _log_failpoints(path: Path) -> None:
    """Write the name of each failpoint that this process reaches to a file."""
    file = path.open("a", buffering=1)
    failpoint = filesystem.failpoint

    def log(name: str) -> None:
        file.write(name + "\n")
        failpoint(name)

    filesystem.failpoint = swap_generation.failpoint = log


def hold_at(held: str, release: Path) -> None:
    """Make this process wait for the file ``release`` at the failpoint ``held``."""
    failpoint = filesystem.failpoint

    def wait(name: str) -> None:
        while name == held and not release.exists():
            time.sleep(0.002)
        failpoint(name)

    filesystem.failpoint = wait
