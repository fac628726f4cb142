"""A fleet's workers on Ray, reached through a process that has joined the cluster.

Ray ends the process that has joined a cluster, from C++ and without an exception, as soon as the
daemon of its machine has died; it waits without end for clusters that do not answer, takes signals
for itself, and writes to stderr. So that is a process of its own (``ray_main``), which can be lost:
the driver hears of it as ``Lost``, and the next worker that it starts has Ray begun again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

from batchinfer.errors import DeviceError, UsageError, install_command
from batchinfer.job.fleet.boot import WorkerSetup
from batchinfer.job.fleet.messages import Assignment, Failure
from batchinfer.job.fleet.on_ray.joiner import END_S, Joiner, begun, is_installed
from batchinfer.job.fleet.on_ray.ray_main import ToJoin
from batchinfer.job.fleet.workers import Lost, Unheard, WorkerEvent

HUNG_S = 30.0
"""A process that has not answered for so long is given up."""
_LATE_S = 1.0
"""How long an answer may be late before its driver goes on without it."""
_POLL_S = 0.1


class RayProcess:
    """Workers in a cluster that another process joins, and joins again where it was lost.

    Args:
        cluster: to join.
        timeout_s: how long that may take.
        stop: when set, it is not waited for any longer.
        first: one that was begun before, to join first.
    """

    def __init__(
        self, cluster: ToJoin, timeout_s: float, stop: Event, first: Joiner | None = None
    ) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._stop = stop
        self._first = first
        self._process: Joiner | None = None
        self._setup: tuple[WorkerSetup, Mapping[str, Any], Sequence[Sequence[int]]] | None = None

    def join(self, timeout_s: float) -> int | None:
        """Join the cluster.

        Returns:
            How many GPUs it has; None where it was asked to stop before that was known.

        Raises:
            UsageError: Ray is not installed.
            DeviceError: the cluster cannot be started, or does not answer in time.
        """
        if not is_installed():
            raise UsageError("scale.workers over 1 needs Ray", hint=install_command("ray"))
        num_gpus = None
        self._process, self._first = self._first or begun(), None
        try:
            self._process.send(self._cluster)
            num_gpus = self._joined(self._process, time.monotonic() + timeout_s)
        finally:
            if num_gpus is None:  # what it says later would answer another question
                self.end()
        return num_gpus

    def _joined(self, process: Joiner, until: float) -> int | None:
        """Wait until a process has joined; as ``join`` has it."""
        while not self._stop.is_set():
            try:
                answer: int | Failure | None = process.answer(_POLL_S)
            except (EOFError, OSError):
                raise self._unusable(process.last_words()) from None
            if isinstance(answer, Failure):
                raise answer.error()
            if answer is not None:
                return answer
            if time.monotonic() > until:
                raise self._unusable("it has not answered within scale.start_timeout")
        return None

    def _unusable(self, why: str) -> DeviceError:
        return DeviceError(
            f"the Ray cluster ({self._cluster.cluster}) cannot be used: {why}",
            hint="run the same command again: finished rows are kept",
        )

    def use(
        self,
        setup: WorkerSetup,
        resources: Mapping[str, Any],
        cores: Sequence[Sequence[int]],
    ) -> None:
        """Say what workers are started with; as ``RayWorkers`` takes it."""
        self._setup = setup, resources, cores
        if self._process is not None:
            self._process.send(self._setup)

    def start(self, worker: str, run_id: str, avoid: frozenset[str]) -> None:
        if self._process is None:
            assert self._setup is not None
            if self._stop.is_set() or self.join(self._timeout_s) is None:
                return
            self.use(*self._setup)
        self._call("start", worker, run_id, avoid)

    def use_kernels(self, kernels: Mapping[str, str]) -> None:
        assert self._setup is not None
        setup, resources, cores = self._setup
        self._setup = replace(setup, pinned_kernels=dict(kernels)), resources, cores
        self._call("use_kernels", dict(kernels))

    def give(self, worker: str, assignment: Assignment) -> None:
        self._call("give", worker, assignment)

    def take_back(self, worker: str, *, everything: bool) -> None:
        self._call("take_back", worker, everything=everything)

    def look(self, worker: str) -> None:
        self._call("look", worker)

    def stop(self, worker: str) -> None:
        self._call("stop", worker)

    def kill(self, worker: str) -> None:
        self._call("kill", worker)

    def close(self) -> None:
        self._call("close")

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        process = self._process
        if process is None:
            time.sleep(timeout_s)
            return []
        process.ask(("wait", (timeout_s,), {}))
        began = time.monotonic()
        try:
            events: list[WorkerEvent] | None = process.answer(timeout_s + _LATE_S)
        except (EOFError, OSError):
            return [self._lost(process, process.last_words())]
        if events is None and process.silent_s > HUNG_S:
            return [self._lost(process, "its process does not answer any more")]
        return [Unheard(time.monotonic() - began)] if events is None else events

    def end(self) -> None:
        """Leave the cluster; one of this machine's own ends."""
        if self._process is not None:
            self._process.end(END_S)
            self._process = None

    def _lost(self, process: Joiner, why: str) -> Lost:
        process.end(0.0)
        self._process = None
        return Lost(why)

    def _call(self, name: str, *arguments: object, **options: object) -> None:
        if self._process is not None:
            self._process.send((name, arguments, options))


@contextmanager
def ray_process(
    cluster: ToJoin, timeout_s: float, stop: Event, first: Joiner | None = None
) -> Iterator[RayProcess]:
    """Workers in a cluster that is left in the end, whatever happens; as ``RayProcess`` has it."""
    process = RayProcess(cluster, timeout_s, stop, first)
    try:
        yield process
    finally:
        process.end()
