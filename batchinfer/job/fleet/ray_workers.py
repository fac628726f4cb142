"""Runs workers on the nodes of a Ray cluster; the only module that imports Ray.

Each worker has a Ray actor, which starts the worker's process on its node, as the launcher does for
local workers. Ray does not restart actors, because the launcher replaces dead workers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from batchinfer.errors import DeviceError, one_line
from batchinfer.job.fleet.local_workers import LocalWorker
from batchinfer.job.fleet.worker_process import WorkerSetup
from batchinfer.process.process import SIGNALS

_ACTOR_DIED = -9
"""Exit code of a worker whose actor died."""


@contextmanager
def joined(cluster: str) -> Iterator[int]:
    """Connect to a cluster, unless already connected; yield the cluster's number of GPUs.

    Ray replaces the handler of SIGTERM when it connects; this function puts the old handlers back.

    Raises:
        DeviceError: Ray cannot connect.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    was_connected = ray.is_initialized()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        if not was_connected:
            ray.init(address=cluster, configure_logging=False, log_to_driver=False)
    except Exception as error:  # Ray raises errors of many types
        raise DeviceError(
            f"cannot connect to the Ray cluster ({cluster}): {one_line(error)}",
            hint="check scale.cluster, and check that `ray status` works on this machine",
        ) from None
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):  # raised outside the main thread
                signal.signal(number, handler)
    try:
        yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        if not was_connected:
            ray.shutdown()


class RayWorker:
    """A worker's process on a node that Ray chooses; ``resources`` are options of its actor."""

    def __init__(self, setup: WorkerSetup, resources: Mapping[str, Any]) -> None:
        options = {**resources, "max_restarts": 0, "max_task_retries": 0}
        self._actor = ray.remote(LocalWorker).options(**options).remote(setup)
        self._next_poll: Any = self._actor.poll.remote()
        self._code: int | None = None
        self._actor_error = ""

    def poll(self) -> tuple[list[dict[str, Any]], int | None]:
        if self._code is not None:
            return [], self._code
        ready, _ = ray.wait([self._next_poll], timeout=0)
        if not ready:
            return [], None
        try:
            messages, self._code = ray.get(self._next_poll)
        except RayError as error:
            self._actor_error, self._code = one_line(error), _ACTOR_DIED
            return [], self._code
        self._next_poll = self._actor.poll.remote()
        return messages, self._code

    def send(self, line: str) -> None:
        self._actor.send.remote(line)

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        with suppress(RayError, GetTimeoutError):
            ray.get(self._actor.kill.remote(), timeout=1.0)
        with suppress(RayError, ValueError):
            ray.kill(self._actor)

    def last_line(self) -> str:
        with suppress(RayError, GetTimeoutError):
            return self._actor_error or str(ray.get(self._actor.last_line.remote(), timeout=1.0))
        return self._actor_error
