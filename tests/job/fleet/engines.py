"""Engines without a model for worker processes; tests choose when they die or fail."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.errors import DeviceError
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.rows.finished_row import FinishedRow
from tests.job.fakes import FakeBuild, FakeBuilt, drawn


def once(folder: Path, what: str) -> bool:
    """Return True in the first process that asks for ``what``."""
    try:
        (folder / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@dataclass(frozen=True)
class Disturbed:
    """Builds engines; one of them fails once, before its step ``at``.

    Args:
        how: the name of a signal to send, or the kind of error to raise: ``device`` or ``bug``.
        pid: the process that gets the signal; 0 means the engine's own process.
        kernels: the first engine uses different kernels.
        never: no engine can be built.
        name: the file that marks that an engine has failed; each name allows one failure.
    """

    folder: Path
    how: str = ""
    at: int = 10
    pid: int = 0
    kernels: bool = False
    never: bool = False
    name: str = "disturbed"

    def __call__(
        self,
        model: object,
        engine: object,
        *,
        log: Any,
        pinned_kernels: dict[str, str] | None = None,
        **_: object,
    ) -> FakeBuilt:
        if self.never:
            raise DeviceError("there is no such device")
        build = FakeBuild(next_token=drawn)
        build.before_step = self._before_step
        built = build(model, engine, log=log)
        if self.kernels:
            first = once(self.folder, "first-build")
            built.kernels = pinned_kernels or {"float32": "fast" if first else "other"}
        return built

    def _before_step(self, number: int) -> None:
        if not self.how or number != self.at or not once(self.folder, self.name):
            return
        if self.how == "device":
            raise DeviceError("the device fell off the bus")
        if self.how == "bug":
            raise ZeroDivisionError
        os.kill(self.pid or os.getpid(), signal.Signals[self.how])


@dataclass(frozen=True)
class Paced:
    """Builds engines with slow steps, in processes that log their finished rows.

    Each process writes ``folder/pid-N`` (see ``log_finished_rows``).
    """

    folder: Path
    step_s: float = 0.05

    def __call__(self, model: object, engine: object, *, log: Any, **_: object) -> FakeBuilt:
        log_finished_rows(self.folder / f"pid-{os.getpid()}")
        build = FakeBuild(next_token=drawn)
        build.before_step = self._before_step
        return build(model, engine, log=log)

    def _before_step(self, number: int) -> None:
        time.sleep(self.step_s)


def log_finished_rows(path: Path) -> None:
    """For each row that this process finishes, append a line with its id and the time to a file."""
    add, file = PartWriter.add, path.open("ab", buffering=0)

    def add_and_log(self: PartWriter, row: FinishedRow) -> None:
        file.write(b"%d %f\n" % (row.values["row_id"], time.monotonic()))
        add(self, row)

    PartWriter.add = add_and_log  # type: ignore[method-assign]
