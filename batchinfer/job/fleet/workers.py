"""What a fleet's driver asks of the processes that its workers are, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from batchinfer.job.fleet.messages import Assignment, Failure, Ready, WorkerReport


@dataclass(frozen=True)
class Up:
    """A worker is ready."""

    worker: str
    node: str
    """Its id in the cluster."""
    ready: Ready


@dataclass(frozen=True)
class NotUp:
    """A worker could not be started."""

    worker: str
    node: str
    failure: Failure
    nodes: frozenset[str] = frozenset()
    """All that the cluster has then; none: that is not known."""


@dataclass(frozen=True)
class Told:
    """A worker's report."""

    worker: str
    report: WorkerReport


@dataclass(frozen=True)
class Gone:
    """A worker that was up is no more."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Seen:
    """A worker's process has been looked at."""

    worker: str
    is_busy: bool
    """Whether it computes."""


@dataclass(frozen=True)
class Unheard:
    """What workers have told meanwhile has not come yet: what carries it is late."""

    seconds: float


@dataclass(frozen=True)
class Lost:
    """The cluster is lost, and all workers with it, those too that were not up yet."""

    reason: str


WorkerEvent = Up | NotUp | Told | Gone | Seen | Unheard | Lost


class Workers(Protocol):
    """Processes with an engine each, wherever they run."""

    def start(self, worker: str, run_id: str, avoid: frozenset[str]) -> None:
        """Begin to start a worker, on none of the nodes in ``avoid``; it may have to wait."""
        ...

    def use_kernels(self, kernels: Mapping[str, str]) -> None:
        """Have workers that are started from now on compute with these."""
        ...

    def give(self, worker: str, assignment: Assignment) -> None:
        """Send a lease."""
        ...

    def take_back(self, worker: str, *, everything: bool) -> None:
        """Ask for rows."""
        ...

    def look(self, worker: str) -> None:
        """Find out whether a worker's process computes; a ``Seen`` may follow."""
        ...

    def stop(self, worker: str) -> None:
        """Ask a worker to put everything on disk and end."""
        ...

    def kill(self, worker: str) -> None:
        """End a worker's process; a ``Gone`` follows."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """What has happened; within the time, or as soon as something has."""
        ...
