"""Workers on their way up: how many are to come, on which nodes, and what they end in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchinfer.errors import DeviceError, JobError
from batchinfer.job.fleet.messages import Failure, Ready
from batchinfer.job.fleet.workers import NotUp, Up, Workers
from batchinfer.job.run_ids import run_id

BOOTS_PER_NODE = 2
"""Workers that could not be started on a node, one after the other, until it is left out."""


@dataclass(frozen=True)
class FleetSize:
    """How many workers there are to be."""

    workers: int
    min_workers: int = 1
    """Rows are leased when so many are up."""
    start_timeout_s: float = 600.0
    """Until so many must be up."""
    waited_s: float = 0.0
    """What of that has passed before: until there was a cluster."""
    same_kernels: bool = False
    """All compute with the kernels that the first to be up has found to be the fastest."""


@dataclass
class Nodes:
    """What became of workers on each node, by the node's id."""

    _failed_boots: Counter[str] = field(default_factory=Counter)
    _broken: set[str] = field(default_factory=set)
    _all: frozenset[str] = frozenset()
    """As they were when a boot failed last; none: they are not known."""

    @property
    def any_left(self) -> bool:
        """Whether there is a node, as far as is known, that is not left out for its boots.

        Boots that ended before they told where they were may have been on any.
        """
        tried = sum(
            min(count, BOOTS_PER_NODE) if node in self._all else count
            for node, count in self._failed_boots.items()
        )
        return tried < BOOTS_PER_NODE * len(self._all)

    @property
    def _without_boots(self) -> frozenset[str]:
        failed = self._failed_boots.items()
        return frozenset(node for node, count in failed if count >= BOOTS_PER_NODE)

    def came_up(self, node: str) -> None:
        """A worker is ready there."""
        self._failed_boots.pop(node, None)

    def failed_to_boot(self, node: str, nodes: frozenset[str]) -> bool:
        """A worker could not be started on one of ``nodes``; whether that is left out now."""
        self._failed_boots[node] += 1
        self._all = nodes
        return node in self._without_boots

    def broke(self, node: str) -> None:
        """A worker that ran there ended because its device or its disk failed."""
        self._broken.add(node)

    def to_avoid(self, *, others_are_up: bool) -> frozenset[str]:
        """Where no worker is to be started.

        Args:
            others_are_up: else a broken node is better than none.
        """
        broken = self._broken if others_are_up else set()
        # Where no other node is left, one that failed twice is tried when a worker has to come.
        failed = self._without_boots if self.any_left or not self._all else set()
        return frozenset(broken | failed)


class Boots:
    """Starts a fleet's workers, and keeps account of them until they are up.

    Args:
        run_number: of the run; workers' run ids have it.
        log: told what happens to them.
        clock: seconds.
    """

    def __init__(
        self,
        workers: Workers,
        size: FleetSize,
        run_number: int,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._size = size
        self._run_number = run_number
        self._log = log
        self._clock = clock
        self._began = clock()
        self._coming: set[str] = set()
        self._num_started = 0
        self._nodes = Nodes()
        self._node_of: dict[str, str] = {}
        """Nodes of the workers that came up."""
        self._broken: set[str] = set()
        """Workers whose device or disk failed, and those that were started in their place."""
        self._latest_failure = Failure("", "")
        """Why a worker could not be started, or ended."""
        self._may_differ: set[str] = set()
        """Workers that were started before the kernels were known that all are to compute with."""
        self._kernels: Mapping[str, str] | None = None

    @property
    def num_coming(self) -> int:
        """Workers that are being started."""
        return len(self._coming)

    def start(self, num_up: int, instead_of: str = "") -> None:
        """Start one more, beside so many that are up; in the place of one that has ended."""
        self._num_started += 1
        worker = f"w{self._num_started:02d}"
        self._coming.add(worker)
        if instead_of in self._broken:
            self._broken.add(worker)
        if self._kernels is None:
            self._may_differ.add(worker)
        avoid = self._nodes.to_avoid(others_are_up=bool(num_up))
        self._workers.start(worker, run_id(self._run_number, worker), avoid)

    def came_up(self, event: Up) -> bool:
        """A worker is ready; whether it is one to give leases to. Else it has to go."""
        self._coming.discard(event.worker)
        self._nodes.came_up(event.node)
        self._node_of[event.worker] = event.node
        ready = event.ready
        self._log(f"{event.worker} is up on {ready.host}: {ready.device}")
        if self._agrees(event.worker, ready):
            return True
        self._log(f"{event.worker} is started again: the first has found other kernels")
        return False

    def failed(self, event: NotUp, num_up: int) -> None:
        """A worker could not be started: start another one, unless its node is left out now.

        While no worker is up or to come, one is tried on each node that is left.

        Raises:
            JobError: no worker is up or to come; what the boots ended in, or a ``DeviceError``.
        """
        self._coming.discard(event.worker)
        self._log(f"{event.worker} could not be started on {event.node}: {event.failure.text}")
        self._latest_failure = event.failure
        is_out = self._nodes.failed_to_boot(event.node, event.nodes)
        is_last = not self._coming and not num_up
        if is_out and is_last and not self._nodes.any_left:
            raise self._no_more_than(0)
        if is_last or not is_out:
            self.start(num_up, event.worker)

    def broke(self, worker: str, failure: Failure, num_others: int) -> bool:
        """A worker that was up ended because its device or its disk failed.

        Returns:
            Whether others go on: so many that are up, or some that are to come. Those that come in
            the place of others that broke do not count: what broke all of them is no node's fault.
        """
        self._latest_failure = failure
        self._nodes.broke(self._node_of[worker])
        self._broken.add(worker)
        return num_others > 0 or not self._coming <= self._broken

    def start_all(self) -> None:
        """Start those anew that were to come when their cluster was lost; at first, all."""
        num = len(self._coming) if self._num_started else self._size.workers
        self._coming.clear()
        for _ in range(num):
            self.start(0)

    def are_enough(self, num_up: int) -> bool:
        """Whether so many are up that rows can be leased.

        Raises:
            JobError: so many cannot be had: what the boots ended in, or a ``DeviceError``.
        """
        least = self._size.min_workers
        if num_up >= least:
            return True
        if num_up + len(self._coming) < least:
            raise self._no_more_than(num_up)
        if self._size.waited_s + self._clock() - self._began > self._size.start_timeout_s:
            raise DeviceError(
                f"{num_up} of scale.min_workers {least} came up within scale.start_timeout",
                hint="give the cluster more nodes, or the job more time",
            )
        return False

    def _agrees(self, worker: str, ready: Ready) -> bool:
        """Whether a worker computes as the first; one that could not know how is started again.

        Those that may differ are started at once all the same: they hardly ever do.
        """
        if not self._size.same_kernels:
            return True
        if self._kernels is None:
            self._kernels = ready.kernels
            self._workers.use_kernels(ready.kernels)
        agrees = ready.kernels == self._kernels or worker not in self._may_differ
        self._may_differ.discard(worker)
        return agrees

    def _no_more_than(self, num_up: int) -> JobError:
        """That too few workers could be started, as what the last one of the others failed of."""
        how_many = f"no more than {num_up} workers" if num_up else "no worker"
        failure = self._latest_failure
        text = f"{how_many} could be started: {failure.text}"
        return Failure(failure.kind or DeviceError.__name__, text).error()
