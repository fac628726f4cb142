"""Workers as Ray actors. This module and ``ray_cluster`` alone import Ray.

Ray starts processes, tells when they die, and carries messages. It never runs anything again by
itself: what is lost with a worker, the driver leases anew.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchinfer.errors import ExitCode, one_line
from batchinfer.job.fleet.boot import WorkerProcess, WorkerSetup
from batchinfer.job.fleet.messages import Assignment, Failure, Ready
from batchinfer.job.fleet.on_ray.pulse import computes
from batchinfer.job.fleet.workers import Gone, NotUp, Seen, Told, Up, WorkerEvent

REPORT_S = 5.0
"""A worker reports so often, and when there is something the driver should know."""
_OWNER_DIED = "owner has died"
"""Ray says so of workers whose cluster goes, for a moment before it ends this process."""
_REPORTS = "reports"
"""Calls that wait for news run in a thread of their own, all others in one, in their order."""


@dataclass(frozen=True)
class Place:
    """Where a worker's process is."""

    node: str
    """Id of its node."""
    pid: int


_UNKNOWN = Place("an unknown node", 0)


class RayWorker(WorkerProcess):
    """A worker that knows which node it is on, and that stops in order where that goes."""

    def __init__(
        self, setup: WorkerSetup, worker: str, run_id: str, cores: Sequence[int] = ()
    ) -> None:
        super().__init__(setup, worker, run_id, cores)
        # Else Ray's end waits a second or two for an interpreter that takes torch down.
        atexit.register(os._exit, ExitCode.OK)
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, *_: object) -> None:
        """Put on disk what there is; who has nothing yet ends at once."""
        if self._worker is None:
            os._exit(ExitCode.INTERRUPTED)
        self.stop()

    def where(self) -> Place:
        """Where it is."""
        return Place(str(ray.get_runtime_context().get_node_id()), os.getpid())


@dataclass
class _Actor:
    handle: Any
    slot: int
    """Which of ``RayWorkers.cores`` are its own."""
    place: Place = _UNKNOWN
    is_up: bool = False


@dataclass
class RayWorkers:
    """A fleet's workers in a cluster that this process is connected to.

    Args:
        setup: what each is started with.
        resources: what Ray sets aside for each: ``num_cpus``, ``num_gpus``, ``resources``.
        cores: of this machine, for each of as many workers; none: each runs anywhere.
    """

    setup: WorkerSetup
    resources: Mapping[str, Any]
    cores: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        self._class = ray.remote(concurrency_groups={_REPORTS: 1})(RayWorker)
        self._stored = ray.put(self.setup)
        self._actors: dict[str, _Actor] = {}
        self._asked: dict[Any, str] = {}
        """Calls that are not answered, and whose they are."""
        self._looks: dict[Any, str] = {}
        """Tasks that look at workers."""
        self._killed: list[WorkerEvent] = []

    def start(self, worker: str, run_id: str, avoid: frozenset[str]) -> None:
        taken = {actor.slot for actor in self._actors.values()}
        slot = min(set(range(len(taken) + 1)) - taken)
        nodes = sorted(avoid - {_UNKNOWN.node})  # Ray takes nothing but ids
        elsewhere = {"label_selector": {"ray.io/node-id": f"!in({','.join(nodes)})"}}
        handle = self._class.options(
            **self.resources,
            max_restarts=0,
            max_task_retries=0,
            **(elsewhere if nodes else {}),
        ).remote(self._stored, worker, run_id, self.cores[slot] if self.cores else ())
        self._actors[worker] = _Actor(handle, slot)
        self._asked[handle.where.remote()] = worker
        self._asked[handle.load.remote()] = worker

    def use_kernels(self, kernels: Mapping[str, str]) -> None:
        self._stored = ray.put(replace(self.setup, pinned_kernels=dict(kernels)))

    def give(self, worker: str, assignment: Assignment) -> None:
        self._send(worker, "give", assignment)

    def take_back(self, worker: str, *, everything: bool) -> None:
        self._send(worker, "take_back", everything)

    def look(self, worker: str) -> None:
        if worker not in self._actors:
            return
        place = self._actors[worker].place
        there = NodeAffinitySchedulingStrategy(place.node, soft=False)
        looks = ray.remote(computes).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        self._looks[looks.remote(place.pid)] = worker

    def stop(self, worker: str) -> None:
        self._send(worker, "stop")

    def kill(self, worker: str) -> None:
        """End a worker's process. Nothing that it still says is heard."""
        if worker in self._actors:
            self._end_process(worker)
            self._killed.append(self._failed(worker, Failure("", "it was killed")))

    def close(self) -> None:
        for worker in list(self._actors):
            self.kill(worker)

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        events, self._killed = self._killed, []
        asked = [*self._asked, *self._looks]
        if not asked:
            time.sleep(0 if events else timeout_s)
            return events
        done, _ = ray.wait(asked, timeout=0 if events else timeout_s)
        if done:
            done, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
        for call in done:
            if call in self._looks:
                events.append(self._seen(call, self._looks.pop(call)))
            elif call in self._asked:  # else its worker's end was heard of a moment ago
                events += self._answered(call, self._asked.pop(call))
        return events

    def _seen(self, look: Any, worker: str) -> Seen:
        try:
            return Seen(worker, is_busy=ray.get(look))
        except RayError:
            return Seen(worker, is_busy=False)

    def _answered(self, call: Any, worker: str) -> list[WorkerEvent]:
        actor = self._actors[worker]
        try:
            answer = ray.get(call)
        except RayError as error:
            if _OWNER_DIED in str(error):
                return []  # this process is on its way out, and its driver hears of that
            # A worker that is "unavailable" may live. But what it was sent, or has told, may be
            # lost, and nothing is told twice: it has to go, and its rows run again.
            self._end_process(worker)
            return [self._failed(worker, Failure("", _reason(error)))]
        match answer:
            case None:
                return []
            case Place():
                actor.place = answer
                return []
            case Failure():
                self._end_process(worker)
                return [self._failed(worker, answer)]
            case Ready():
                actor.is_up = True
                self._ask(worker)
                return [Up(worker, actor.place.node, answer)]
        if not answer.is_over:
            self._ask(worker)
        return [Told(worker, answer)]

    def _ask(self, worker: str) -> None:
        report = self._actors[worker].handle.report.options(concurrency_group=_REPORTS)
        self._asked[report.remote(REPORT_S)] = worker

    def _send(self, worker: str, method: str, *arguments: Any) -> None:
        if worker in self._actors:
            call = getattr(self._actors[worker].handle, method).remote(*arguments)
            self._asked[call] = worker

    def _end_process(self, worker: str) -> None:
        with suppress(RayError, ValueError):
            ray.kill(self._actors[worker].handle)

    def _failed(self, worker: str, failure: Failure) -> WorkerEvent:
        actor = self._actors.pop(worker)
        self._asked = {call: name for call, name in self._asked.items() if name != worker}
        if actor.is_up:
            return Gone(worker, failure.text)
        nodes = frozenset(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])
        return NotUp(worker, actor.place.node, failure, nodes)


def _reason(error: RayError) -> str:
    """What Ray says of a worker's end, on one line."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return one_line(error.cause)
    if isinstance(error, RayActorError) and error.actor_init_failed:
        *_, last = str(error).splitlines()  # of a traceback
        return one_line(RayActorError(error_msg=last))
    return one_line(error)
