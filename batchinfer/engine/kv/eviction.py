"""In which order blocks that nobody needs now give up their places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from batchinfer.engine.kv.prefix_index import Block, WindowSlot

Place = TypeVar("Place", Block, Block | WindowSlot)
"""What holds one slot."""


class EvictionOrder(Generic[Place]):
    """Blocks without a known future use first, then the others; least recently used within both."""

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
        """Put a block behind its like."""
        (self._wanted if block.wanted else self._idle)[block] = None

    def discard(self, block: Place) -> None:
        """Take a block out, if it is there."""
        if block in self._idle:
            del self._idle[block]
        else:
            self._wanted.pop(block, None)

    def update_priority(self, block: Place) -> None:
        """Whether a block is wanted may have changed."""
        if block in self:
            self.discard(block)
            self.add(block)

    def first(self) -> Place:
        """The block to go next."""
        return next(iter(self))

    def first_idle(self) -> Place | None:
        """The same, if nobody is known to want it."""
        return next(iter(self._idle), None)
