"""Which nodes of a cluster are left out, because workers fail there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

BOOTS_PER_NODE = 2
"""Workers that could not be started on a node, one after the other, until it is left out."""


@dataclass
class Nodes:
    """What became of workers on each node, by the node's id."""

    _failed_boots: Counter[str] = field(default_factory=Counter)
    _broken: set[str] = field(default_factory=set)
    _all: frozenset[str] = frozenset()
    """As they were when a boot failed last; none: they are not known."""

    @property
    def any_left(self) -> bool:
        """Whether there is a node, as far as is known, that is not left out for its boots."""
        return bool(self._all - self._without_boots)

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
