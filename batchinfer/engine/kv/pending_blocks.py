"""Tracks blocks whose contents are not confirmed yet, and block copies before the next step.

A block's contents are confirmed when the step that writes them has succeeded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from batchinfer.engine.kv.prefix_index import Block

Pairs = list[tuple[int, int]]
"""(source slot, destination slot)"""


class PendingBlocks:
    """Blocks that submitted steps and the step being built fill or move."""

    def __init__(self) -> None:
        self.filled: set[Block] = set()
        """Blocks that the step being built fills."""
        self.moved: set[Block] = set()
        """Blocks that the step being built swaps out or in."""
        self._submitted: deque[set[Block]] = deque()
        """Blocks that each submitted step fills or moves, oldest first."""

    def mark_filled(self, block: Block) -> None:
        """Record that the last submitted step, not the step being built, fills a block."""
        self.filled.remove(block)
        if self._submitted:
            self._submitted[-1].add(block)

    def push_step(self) -> None:
        self._submitted.append(self.filled | self.moved)
        self.filled, self.moved = set(), set()

    def commit_oldest(self) -> None:
        """Forget the oldest submitted step, which succeeded."""
        self._submitted.popleft()

    def drain(self) -> list[Block]:
        """Remove and return the blocks of all steps, because none of the steps will complete."""
        blocks = [block for step in (*self._submitted, self.filled, self.moved) for block in step]
        self._submitted.clear()
        self.filled, self.moved = set(), set()
        return blocks


@dataclass(slots=True)
class BlockCopies:
    """Copies before a step: first ``outs``, then ``ins``, then ``within``, each list in order."""

    outs: Pairs = field(default_factory=list)
    """Copies from device slots to host slots."""
    ins: Pairs = field(default_factory=list)
    """Copies from host slots to device slots."""
    within: Pairs = field(default_factory=list)
    """Copies between device slots. No destination is also a source."""
