"""Workers on the nodes of a Ray cluster. This module alone imports Ray, and its public API only.

An actor starts the same process on its node that the launcher starts on its own machine. Ray never
runs anything again by itself.
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

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_GONE = -9


@contextmanager
def joined(cluster: str) -> Iterator[int]:
    """Be in a cluster, where this process is not in one already; yields how many GPUs it has.

    Ray takes SIGTERM for itself when it connects; the handlers that were there are put back.

    Raises:
        DeviceError: it cannot be joined.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    was_in, handlers = (
        ray.is_initialized(),
        {number: signal.getsignal(number) for number in _SIGNALS},
    )
    try:
        if not was_in:
            address = "auto" if cluster == "auto" else cluster
            ray.init(address=address, configure_logging=False, log_to_driver=False)
    except Exception as error:  # Ray raises whatever it met
        raise DeviceError(
            f"the Ray cluster ({cluster}) cannot be used: {one_line(error)}"
        ) from None
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)
    try:
        yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        if not was_in:
            ray.shutdown()


class RayWorker:
    """A worker's process on the node where Ray finds room for it.

    Args:
        resources: what Ray sets aside for it, as options of an actor.
    """

    def __init__(self, setup: WorkerSetup, resources: Mapping[str, Any]) -> None:
        options = {**resources, "max_restarts": 0, "max_task_retries": 0}
        self._actor = ray.remote(LocalWorker).options(**options).remote(setup)
        self._asked: Any = self._actor.poll.remote()
        self._code: int | None = None
        self._why = ""

    def poll(self) -> tuple[list[dict[str, Any]], int | None]:
        if self._code is not None:
            return [], self._code
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return [], None
        try:
            messages, self._code = ray.get(self._asked)
        except RayError as error:
            self._why, self._code = one_line(error), _GONE
            return [], _GONE
        self._asked = self._actor.poll.remote()
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

    def last_words(self) -> str:
        with suppress(RayError, GetTimeoutError):
            return self._why or str(ray.get(self._actor.last_words.remote(), timeout=1.0))
        return self._why
