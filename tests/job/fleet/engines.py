"""Engines without a model that die, freeze or fail when a test wants it; they go to other processes
by their names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.errors import DeviceError
from batchinfer.job.output import part_writer
from batchinfer.job.output.part_writer import PartWriter
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.storage.failpoints import VARIABLE
from tests.job.fakes import FakeBuild, FakeBuilt, drawn


@dataclass(frozen=True)
class Paced:
    """Builds engines whose steps take some time, in processes that tell what they do.

    In ``folder`` is a file ``pid-N`` of each process; it has a line for each row as it finishes,
    with the time.
    """

    folder: Path
    step_s: float = 0.05

    def __call__(self, model: object, engine: object, *, log: Callable[[str], None]) -> FakeBuilt:
        _tell_finished(self.folder / f"pid-{os.getpid()}")
        build = FakeBuild(next_token=drawn)
        build.before_step = self._before_step
        return build(model, engine, log=log)

    def _before_step(self, number: int) -> None:
        time.sleep(self.step_s)


def _tell_finished(path: Path) -> None:
    """Have this process write down each row that it finishes."""
    add, file = PartWriter.add, path.open("ab", buffering=0)

    def add_and_tell(self: PartWriter, row: FinishedRow) -> None:
        file.write(b"%d %f\n" % (row.values["row_id"], time.monotonic()))
        add(self, row)

    PartWriter.add = add_and_tell  # type: ignore[method-assign]


@dataclass(frozen=True)
class OneSlow:
    """Builds engines that begin together, ``count`` of them, the first one of them slower.

    In ``folder`` is a file ``steps-N`` of each process, with the time of each step.
    """

    folder: Path
    count: int
    step_s: float
    slowness: float

    def __call__(self, model: object, engine: object, *, log: Callable[[str], None]) -> FakeBuilt:
        slow = happens(self.folder, "slow", 1)
        file = (self.folder / f"steps-{os.getpid()}").open("ab", buffering=0)

        def before_step(number: int) -> None:
            if number == 0:
                happens(self.folder, "begun", self.count)
                while how_often(self.folder, "begun") < self.count:
                    time.sleep(0.01)
            time.sleep(self.step_s * (self.slowness if slow else 1.0))
            file.write(b"%f\n" % time.monotonic())

        build = FakeBuild(next_token=drawn)
        build.before_step = before_step
        return build(model, engine, log=log)


def happens(folder: Path, name: str, times: int) -> bool:
    """Whether this is one of the first ``times`` calls, of all processes'."""
    for number in range(times):
        try:
            os.close(os.open(folder / f"{name}-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False


def how_often(folder: Path, name: str) -> int:
    """How many times it has happened."""
    return len(list(folder.glob(f"{name}-*")))


class Disturbed:
    """Builds engines, in each of whose steps something may happen first."""

    def __call__(self, model: object, engine: object, *, log: Callable[[str], None]) -> FakeBuilt:
        build = FakeBuild(next_token=drawn)
        build.before_step = self._before_step
        return build(model, engine, log=log)

    def _before_step(self, number: int) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Dies(Disturbed):
    """Builds engines of which the first ``times`` get a signal in their ``step``th step."""

    folder: Path
    times: int
    step: int = 4
    number: signal.Signals = signal.SIGKILL

    def _before_step(self, number: int) -> None:
        if number == self.step and happens(self.folder, "death", self.times):
            os.kill(os.getpid(), self.number)


@dataclass(frozen=True)
class DiesOf:
    """Builds engines that no process survives that run a prompt which begins so."""

    prompt: bytes
    folder: Path

    def __call__(self, model: object, engine: object, *, log: Callable[[str], None]) -> FakeBuilt:
        return FakeBuild(next_token=self._next_token)(model, engine, log=log)

    def _next_token(self, context: bytes, stream: int, sample: int, position: int) -> int:
        ids = np.frombuffer(context, dtype=np.int32).tolist()
        if bytes_of(ids).startswith(self.prompt):
            happens(self.folder, "poisoned", 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return drawn(context, stream, sample, position)


def bytes_of(ids: list[int]) -> bytes:
    """The text of the byte tokenizer's ids."""
    from tests.job.fakes import byte_tokenizer

    return byte_tokenizer().decode(ids, skip_special_tokens=True).encode()


def never_built(model: object, engine: object, *, log: Any) -> FakeBuilt:
    """No engine: the device is too small."""
    raise DeviceError("the device is too small for this test")


@dataclass(frozen=True)
class Breaks(Disturbed):
    """Builds engines of which the first has a bug in its ``step``th step."""

    folder: Path
    step: int = 4

    def _before_step(self, number: int) -> None:
        if number == self.step and happens(self.folder, "bug", 1):
            raise ZeroDivisionError("a bug of this test")


@dataclass(frozen=True)
class Signals(Disturbed):
    """Builds engines of which one, in its ``step``th step, sends its driver a signal."""

    folder: Path
    driver: int
    number: signal.Signals
    step: int = 6

    def _before_step(self, number: int) -> None:
        if number == self.step and happens(self.folder, "signal", 1):
            os.kill(self.driver, self.number)


@dataclass(frozen=True)
class KillsNode(Disturbed):
    """Builds engines of which one, in its ``step``th step, kills its node's raylet, and waits for
    what comes of it."""

    folder: Path
    step: int = 4

    def _before_step(self, number: int) -> None:
        if number == self.step and happens(self.folder, "node", 1):
            os.kill(os.getppid(), signal.SIGKILL)
            while True:
                time.sleep(1.0)


@dataclass(frozen=True)
class WaitsForAnother(Disturbed):
    """Builds engines that go on when two of them run."""

    folder: Path

    def _before_step(self, number: int) -> None:
        if number == 0:
            happens(self.folder, "engine", 2)
        while number == 2 and how_often(self.folder, "engine") < 2:
            time.sleep(0.05)


@dataclass(frozen=True)
class DiesAt:
    """Builds engines of which one dies at a failpoint, the ``count``th time it comes there; it puts
    rows on disk a few at a time."""

    folder: Path
    point: str
    count: int = 1

    def __call__(self, model: object, engine: object, *, log: Callable[[str], None]) -> FakeBuilt:
        if happens(self.folder, "failpoint", 1):
            os.environ[VARIABLE] = f"{self.point}:{self.count}"
            part_writer.FLUSH_ROWS = 8
        return FakeBuild(next_token=drawn)(model, engine, log=log)


@dataclass(frozen=True)
class Freezes(Disturbed):
    """Builds engines of which one freezes in its ``step``th step, with its process, and writes down
    which that is; the others wait there until the file ``go-on`` is in the folder."""

    folder: Path
    step: int = 4

    def _before_step(self, number: int) -> None:
        if number != self.step:
            return
        if happens(self.folder, "frozen", 1):
            (self.folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        while not (self.folder / "go-on").exists():
            time.sleep(0.05)
