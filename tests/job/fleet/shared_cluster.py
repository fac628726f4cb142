"""One cluster for many jobs: the process of the tests has joined it, and fleets use it there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from batchinfer.job.fleet.on_ray import ray_main, ray_process
from batchinfer.job.fleet.on_ray.joiner import Joiner
from batchinfer.job.fleet.on_ray.ray_cluster import connected


class _Served:
    """What is a process elsewhere: a thread that does what its driver asks."""

    def __init__(self, driver: Connection) -> None:
        self._driver = driver
        self._thread = Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(EOFError, OSError), self._driver:
            ray_main.serve(self._driver)

    def wait(self, timeout: float | None = None) -> int:
        """As a process has it."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a thread", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """It ends by itself when its driver has."""


def _begun_here() -> Joiner:
    ours, theirs = Pipe()
    process: Any = _Served(theirs)
    return Joiner(process, ours, BytesIO())


@contextmanager
def shared_cluster(num_workers: int, **options: Any) -> Iterator[None]:
    """A cluster of this machine's own, in which all fleets run that this process starts."""
    begun = ray_process.begun
    with connected("local", num_workers=num_workers, **options):
        ray_process.begun = _begun_here
        try:
            yield
        finally:
            ray_process.begun = begun
