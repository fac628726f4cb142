"""The process of a worker: a run that claims parts, started and watched by a launcher.

The process reads its pickled setup from stdin. After each load of the model, the process waits for
the line ``go``. If stdin ends, the launcher has died, so the process sends itself SIGTERM. The
process writes messages to stdout, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from batchinfer.console.meter import Meter
from batchinfer.console.progress_bar import MeteredProgress, Progress
from batchinfer.console.text_view import Display
from batchinfer.errors import ExitCode, JobError, ModelError
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.job import BuildEngine
from batchinfer.job.run.run_job import run_job
from batchinfer.job.run.threads import Repeater
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.run_record import package_versions
from batchinfer.process.process import (
    bound_spinning,
    leave_on_signals,
    leaves_at_once,
    skip_optional_imports,
)

_REPORT_EVERY_S = 1.0


@dataclass(frozen=True)
class WorkerSetup:
    """The setup that a launcher sends to a worker."""

    spec: JobSpec
    role: Role
    versions: Mapping[str, str]
    """The launcher's versions of the packages that affect the output."""
    build: BuildEngine | None = None


class _Messages:
    """Sends messages to the launcher; safe to call from several threads."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries now print to stderr, so stdout has only messages
        self._lock = Lock()

    def send(self, **message: Any) -> None:
        with self._lock, suppress(OSError):  # the stdin thread notices if the launcher has died
            self._file.write(json.dumps(message) + "\n")
            self._file.flush()


class _WorkerDisplay(Display):
    """Sends a worker's counts to the launcher and shows nothing."""

    def __init__(self, messages: _Messages) -> None:
        super().__init__(quiet=True, result_on_stdout=False)
        self.phases = None
        self._messages = messages

    def progress(self, meter: Meter) -> Progress:
        return _ReportedProgress(meter, self._messages)

    def _write(self, *_: object) -> None:
        """Write nothing, because the launcher shows the progress."""


class _ReportedProgress(MeteredProgress):
    """Sends the progress to the launcher every second."""

    def __init__(self, meter: Meter, messages: _Messages) -> None:
        super().__init__(meter)
        self._messages = messages
        self._repeater = Repeater(self._report, _REPORT_EVERY_S)
        self._repeater.__enter__()

    def _report(self) -> None:
        counts = asdict(self.meter.counts) | {
            "failed": self.meter.failed,
            "reused": self.meter.reused,
        }
        self._messages.send(counts=counts, pool=self.meter.pool)

    def close(self) -> None:
        self._repeater.__exit__()
        self._report()


def main() -> int:
    leave_on_signals()
    bound_spinning()
    skip_optional_imports()
    messages, lines = _Messages(), SimpleQueue[str]()
    setup: WorkerSetup = pickle.load(sys.stdin.buffer)
    Thread(target=_read, args=(lines,), daemon=True).start()
    versions = package_versions()
    try:
        for name, version in setup.versions.items():
            if versions[name] != version:
                raise ModelError(
                    f"{name} is {versions[name]} on this node, but {version} on "
                    "the launcher's node",
                    hint="install the same versions on all nodes",
                )
        return int(
            run_job(
                setup.spec,
                role=setup.role,
                build=_Builds(setup.build, messages, lines),
                display=_WorkerDisplay(messages),
            )
        )
    except JobError as error:
        messages.send(failure={"kind": type(error).__name__, "text": str(error)})
        return int(error.exit_code)


def _read(lines: SimpleQueue[str]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line.decode().strip())
    os.kill(os.getpid(), signal.SIGTERM)


class _Builds:
    """Builds engines, and waits after each build until the launcher lets rows run.

    A worker builds a second engine if another worker chose the job's kernels first.
    """

    def __init__(
        self, build: BuildEngine | None, messages: _Messages, lines: SimpleQueue[str]
    ) -> None:
        self._build = build
        self._messages = messages
        self._lines = lines
        self._has_built = False

    def __call__(self, *args: Any, **keys: Any) -> Any:
        if self._build is None:
            from batchinfer.builders.engine import build_engine  # slow, because it imports torch

            self._build = build_engine
        if self._has_built:
            self._messages.send(again=True)
        context = self._build(*args, **keys)
        self._has_built = True
        self._messages.send(up={"device": context.device})
        self._lines.get()
        return context


if __name__ == "__main__":
    with leaves_at_once():
        try:
            code = main()
        except KeyboardInterrupt:
            code = int(ExitCode.INTERRUPTED)
        sys.exit(code)
