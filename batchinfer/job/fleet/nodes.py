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

    def came_up(self, node: str) -> None:
        """A worker is ready there."""
        self._failed_boots.pop(node, None)

    def failed_to_boot(self, node: str) -> bool:
        """A worker could not be started there; whether to try another one."""
        self._failed_boots[node] += 1
        return self._failed_boots[node] < BOOTS_PER_NODE

    def broke(self, node: str) -> None:
        """A worker that ran there ended because its device or its disk failed."""
        self._broken.add(node)

    def to_avoid(self, *, others_are_up: bool) -> frozenset[str]:
        """Where no worker is to be started.

        Args:
            others_are_up: else a broken node is better than none.
        """
        bad = {node for node, count in self._failed_boots.items() if count >= BOOTS_PER_NODE}
        return frozenset(bad | self._broken if others_are_up else bad)
