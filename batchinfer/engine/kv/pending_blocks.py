"""What is pending for blocks: contents not yet confirmed, and copies the next step begins with.

A block's contents are not certain as long as no step is known to have put them there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from batchinfer.engine.kv.prefix_index import Block

Pairs = list[tuple[int, int]]
"""(source slot, destination slot)"""


class PendingBlocks:
    """What the step being built, and those submitted before it, fill or move."""

    def __init__(self) -> None:
        self.filled: set[Block] = set()
        """Blocks that the step being built fills."""
        self.moved: set[Block] = set()
        """Blocks that it takes to the host or back."""
        self._submitted: deque[set[Block]] = deque()
        """Of each submitted step, oldest first."""

    def mark_filled(self, block: Block) -> None:
        """A block is not filled by the step being built, but by one before it."""
        self.filled.remove(block)
        if self._submitted:
            self._submitted[-1].add(block)

    def push_step(self) -> None:
        """The step that was built is under way."""
        self._submitted.append(self.filled | self.moved)
        self.filled, self.moved = set(), set()

    def commit_oldest(self) -> None:
        """The oldest submitted step ran."""
        self._submitted.popleft()

    def drain(self) -> list[Block]:
        """All of them, of steps that will not run; they are known no longer."""
        blocks = [block for step in (*self._submitted, self.filled, self.moved) for block in step]
        self._submitted.clear()
        self.filled, self.moved = set(), set()
        return blocks


@dataclass(slots=True)
class BlockCopies:
    """Done in this order, each list from its beginning: what leaves the device, what comes back,
    what is copied on the device."""

    outs: Pairs = field(default_factory=list)
    """From device slots to host slots."""
    ins: Pairs = field(default_factory=list)
    """From host slots to device slots."""
    within: Pairs = field(default_factory=list)
    """From device slots to device slots; a destination is nobody's source."""
