"""Eviction order of unreferenced blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from batchinfer.engine.kv.prefix_index import Block, WindowSlot

Place = TypeVar("Place", Block, Block | WindowSlot)
"""A block, or one window slot of a block: the unit of eviction."""


class EvictionOrder(Generic[Place]):
    """Eviction order: blocks without a known future use, then wanted blocks, both in LRU order."""

    def __init__(self) -> None:
        self._idle: OrderedDict[Place, None] = OrderedDict()
        self._wanted: OrderedDict[Place, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle) + len(self._wanted)

    def __contains__(self, block: Place) -> bool:
        return block in self._idle or block in self._wanted

    def __iter__(self) -> Iterator[Place]:
        yield from self._idle
        yield from self._wanted

    def add(self, block: Place) -> None:
        """Add a block as the most recently used."""
        (self._wanted if block.wanted else self._idle)[block] = None

    def discard(self, block: Place) -> None:
        if block in self._idle:
            del self._idle[block]
        else:
            self._wanted.pop(block, None)

    def update_priority(self, block: Place) -> None:
        """Update a block's place after its future use changed."""
        if block in self:
            self.discard(block)
            self.add(block)

    def first(self) -> Place:
        return next(iter(self))

    def first_idle(self) -> Place | None:
        """Return the first block if it has no known future use, else None."""
        return next(iter(self._idle), None)
