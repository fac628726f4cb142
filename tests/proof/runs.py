"""Runs of a cell's job, each in a process of its own, and what they leave in the output.

Each run is forked from a process that has imported the product but has computed nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.storage import filesystem
from tests.faults.kills import Child, InBucket, InFolder, Pace, hold_at, start

LIMIT_S = 300.0
"""Seconds after which a run counts as stuck."""
_OFTEN = Pace(0.0, 2)
"""Runs write finished rows and the tokens of unfinished rows after each step."""
_OFTEN_IN_STORE = Pace(3.0, 4)
"""Requests to a store take longer."""

Act = Callable[[], object]
"""Does something to a running process, in that process."""


def nothing() -> None:
    """Leave the process alone."""


@dataclass
class Runs:
    """Runs one job until it has ended, with faults.

    Args:
        spec: the job.
        output: reads the output.
        num_workers: number of processes that share the job.
        folder: where the processes write their logs.
    """

    spec: JobSpec
    output: InFolder | InBucket
    num_workers: int
    folder: Path
    codes: list[int] = field(default_factory=list)
    """Exit statuses of all processes so far; negative for a signal."""

    def run(
        self,
        prepare: Act = nothing,
        *,
        failpoint: str = "",
        everywhere: bool = False,
        hold: bool = False,
        retry_errors: bool = False,
    ) -> int:
        """Run the job once; return the exit status of the (first) process.

        Args:
            prepare: called in the first process before the job begins.
            failpoint: where the first process kills itself, as ``NAME:COUNT``.
            everywhere: true to let every process kill itself at ``failpoint``.
            hold: true to let the other workers begin when the first one has claimed a part, and
                write no finished row until it has ended. Otherwise they might finish the job before
                the fault strikes.
        """
        claimed, ended = self.folder / "claimed", self.folder / "ended"
        for mark in (claimed, ended):
            mark.unlink(missing_ok=True)
        is_worker = self.num_workers > 1 and not retry_errors
        role = Role(is_worker=True, num_workers=self.num_workers) if is_worker else None
        pace = _OFTEN if isinstance(self.output, InFolder) else _OFTEN_IN_STORE

        def prepare_first() -> None:
            at_failpoint("claims-durable", 2, claimed.touch)()  # the first claim is empty
            prepare()

        def wait_and_hold() -> None:
            while not claimed.exists() and not ended.exists():
                time.sleep(0.002)
            hold_at("segments-staged", ended)

        first = partial(start, self.spec, None, pace, self.folder, failpoint, prepare_first)
        children = [first(role=role, retry_errors=retry_errors)]
        if is_worker:
            own = wait_and_hold if hold else nothing
            other = failpoint if everywhere else ""
            others = partial(start, self.spec, None, pace, self.folder, other, own, role=role)
            children += [others() for _ in range(self.num_workers - 1)]
        statuses = []
        try:
            for child in children:
                statuses.append(_wait(child))
                ended.touch()
        finally:
            for child in children[len(statuses) :]:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
        self.codes += statuses
        return min(statuses) if everywhere else statuses[0]

    def finish(self) -> None:
        """Run the job without a fault.

        Raises:
            StuckError: the run ends with another exit status than 0.
        """
        if code := self.run():
            raise StuckError(f"the last run ended with exit status {code}")

    def files(self, folder: str) -> dict[str, bytes]:
        """Return the content of the files in a folder of the output, by relative path."""
        return {name: data for name, data in self.output.files().items() if name.startswith(folder)}


def _wait(child: Child) -> int:
    until = time.monotonic() + LIMIT_S
    while not child.has_ended() and time.monotonic() < until:
        time.sleep(0.002)
    if not child.has_ended():
        raise StuckError(f"a run did not end within {LIMIT_S:.0f} s")
    return child.wait()


class StuckError(Exception):
    """A job does not end as it should."""


def at_failpoint(name: str, count: int, act: Act) -> Act:
    """Return a function that makes its process call ``act`` when it reaches the failpoint ``name``
    for the ``count``-th time."""

    def prepare() -> None:
        before, reached = filesystem.failpoint, Counter[str]()

        def failpoint(reached_name: str) -> None:
            reached[reached_name] += 1
            if (reached_name, reached[reached_name]) == (name, count):
                act()
            before(reached_name)

        filesystem.failpoint = failpoint

    return prepare


def expect(code: int, *expected: int) -> None:
    """Check an exit status.

    Raises:
        StuckError: the status is not one of ``expected``.
    """
    if code not in expected:
        raise StuckError(f"exit status {code}; expected {' or '.join(map(str, expected))}")
