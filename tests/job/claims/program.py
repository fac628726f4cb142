"""Run a shard or a worker of a job in its own process.

``python -m tests.job.claims.program FOLDER I/N|worker [NAME=VALUE ...]``, where an option is one of

- ``STEP=SIGNAL``: send the signal before this step of the engine,
- ``freezes=yes``: stop the process before it claims parts for the second time,
- ``lapse=S``: treat a process without heartbeats as dead after S seconds,
- any other name: a key of ``output``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from batchinfer.errors import JobError
from batchinfer.job.claims.shard import parse_shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.claims.worker_queue import ClaimedParts
from batchinfer.job.output import part_writer
from batchinfer.job.run.run_job import run_job
from batchinfer.job.storage import local_lock
from tests.job.fakes import FakeBuild, job


def main() -> int:
    part_writer.FLUSH_ROWS = 2
    folder, what, *options = sys.argv[1:]
    role = Role(is_worker=True) if what == "worker" else Role(parse_shard(what, {}))
    given = dict(option.split("=", 1) for option in options)
    local_lock.LAPSE_S = float(given.pop("lapse", local_lock.LAPSE_S))
    if given.pop("freezes", ""):
        ClaimedParts.next = _freezing(ClaimedParts.next)  # type: ignore[method-assign]
    signals = {int(step): given.pop(step) for step in list(given) if step.isdigit()}

    def before_step(number: int) -> None:
        if number in signals:
            os.kill(os.getpid(), signal.Signals[signals[number]])

    build = FakeBuild(max_num_seqs=4)
    build.before_step = before_step
    spec = job(Path(folder), output=given)
    try:
        return int(run_job(spec, role=role, build=build))
    except JobError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


def _freezing(claim: Callable[..., Any]) -> Callable[..., Any]:
    times = count(1)

    def claim_or_freeze(*arguments: Any) -> Any:
        if next(times) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            signal.sigtimedwait([], 0.5)  # SIGSTOP may take effect a moment later
        return claim(*arguments)

    return claim_or_freeze


if __name__ == "__main__":
    sys.exit(main())
