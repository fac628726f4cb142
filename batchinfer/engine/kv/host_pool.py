"""Host slots for wanted blocks that lose their device slots."""

from __future__ import annotations

from collections import OrderedDict

from batchinfer.engine.kv.eviction import EvictionOrder
from batchinfer.engine.kv.prefix_index import Block


class HostPool:
    """Blocks with host slots, and the order in which they lose them.

    Every block with a host slot is indexed. Dropping the host slot of a block that is also on the
    device loses nothing; otherwise the block is lost.

    Args:
        num_slots: capacity in blocks; memory of unused slots is never touched.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.changes = 0
        """Number of changes to the set of blocks on the host only."""
        self._next = 0
        self._returned: list[int] = []
        self._alone: EvictionOrder[Block] = EvictionOrder()
        """Unreferenced blocks without a device slot."""
        self._copies: OrderedDict[Block, None] = OrderedDict()
        """Blocks with a device slot as well."""
        self._read: list[Block] = []
        """Blocks swapped in by the step being built, which reads their host slots."""
        self._read_last: list[int] = []
        """Slots of such blocks that were dropped; they are free after that step."""

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return self._next - len(self._returned)

    def take_slot(self) -> int | None:
        """A free slot, or None.

        Also None while an unwanted block holds a slot: that is reused before new memory is touched.
        """
        if self._returned:
            return self._returned.pop()
        if self._next == self.num_slots or self._alone.first_idle() is not None:
            return None
        self._next += 1
        return self._next - 1

    def return_slot(self, slot: int) -> None:
        """Free a slot."""
        self._returned.append(slot)

    def candidate(self) -> Block | None:
        """The next block to lose its slot: an unwanted one, else a copy, else the oldest."""
        idle = self._alone.first_idle()
        if idle is not None:
            return idle
        return next(iter(self._copies), next(iter(self._alone), None))

    def keep_host_only(self, block: Block) -> None:
        """Register an unreferenced block that lost its device slot."""
        self._copies.pop(block, None)
        self._alone.add(block)
        self.changes += 1

    def refer(self, block: Block) -> None:
        """Protect a host-only block that gained a reference."""
        self._alone.discard(block)
        self.changes += 1

    def read(self, block: Block) -> None:
        """Register a block that the step being built swaps in; its host slot stays until then."""
        self._read.append(block)
        self.changes += 1

    def settle(self) -> None:
        """Register blocks swapped in by a submitted step; they keep their host slots for now."""
        for block in self._read:
            if block.slot >= 0 and block.host_slot >= 0:
                self._copies[block] = None
        self._read.clear()
        self._returned += self._read_last
        self._read_last.clear()

    def update_priority(self, block: Block) -> None:
        """Update a block's place after its future use changed."""
        self._alone.update_priority(block)

    def drop(self, block: Block) -> None:
        """Free a block's host slot."""
        self._copies.pop(block, None)
        self._alone.discard(block)
        if block.ref_count > 0 and block in self._read:
            self._read_last.append(block.host_slot)
        else:
            self.return_slot(block.host_slot)
        block.host_slot = -1
        self.changes += 1
