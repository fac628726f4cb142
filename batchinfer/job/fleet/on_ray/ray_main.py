"""The process that has joined a fleet's Ray cluster: it does what its driver's process asks.

python -m batchinfer.job.fleet.on_ray.ray_main FD PARENT
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection

from batchinfer.errors import JobError

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class ToJoin:
    """A cluster, as ``ray_cluster.connected`` takes it."""

    cluster: str
    num_workers: int
    preload: Sequence[str] = ()


def main() -> None:
    """Join the cluster that the first message names, and serve."""
    file, parent = map(int, sys.argv[1:])
    if sys.platform == "linux":  # elsewhere the pipe says so, at the next call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("who started this has ended")
    for number in _SIGNALS:  # they are the driver's to answer, who ends this process
        signal.signal(number, signal.SIG_IGN)
    driver = Connection(file)
    with suppress(EOFError, BrokenPipeError):  # the driver has ended
        try:
            serve(driver)
        except JobError as error:
            from batchinfer.job.fleet.messages import Failure

            driver.send(Failure(type(error).__name__, str(error)))
    # The interpreter would take half a second to take Ray's modules down, and the driver waits.
    os._exit(0)


def serve(driver: Connection) -> None:
    """Join a cluster, and do what is asked until there is no more.

    Ray is imported first: that takes half a second, in which the driver looks at its job.
    """
    import_module("ray")
    from batchinfer.job.fleet.on_ray.ray_cluster import connected

    to_join: ToJoin | None = driver.recv()
    if to_join is None:
        return
    with connected(
        to_join.cluster, num_workers=to_join.num_workers, preload=to_join.preload
    ) as num_gpus:
        driver.send(num_gpus)
        from batchinfer.job.fleet.on_ray.ray_workers import RayWorkers

        workers = RayWorkers(*driver.recv())
        while (call := driver.recv()) is not None:
            name, arguments, options = call
            answer = getattr(workers, name)(*arguments, **options)
            if name == "wait":
                driver.send(answer)


if __name__ == "__main__":
    main()
