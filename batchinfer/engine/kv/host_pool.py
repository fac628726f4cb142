"""The pool of host slots, which keep evicted blocks that have a known future use."""

from __future__ import annotations

from collections import OrderedDict

from batchinfer.engine.kv.eviction import EvictionOrder
from batchinfer.engine.kv.prefix_index import Block


class HostPool:
    """Blocks with host slots, in the order in which they will lose these slots.

    Every block with a host slot is indexed. The contents of a block that loses its host slot are
    lost unless it also has a device slot.

    Args:
        num_slots: capacity in blocks. Slots that were never used do not take physical memory.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.changes = 0
        """Number of changes to the set of blocks that are only on the host."""
        self._next = 0
        self._returned: list[int] = []
        self._alone: EvictionOrder[Block] = EvictionOrder()
        """Unreferenced blocks without a device slot."""
        self._copies: OrderedDict[Block, None] = OrderedDict()
        """Blocks that also have a device slot."""
        self._read: list[Block] = []
        """Blocks that the step being built swaps in by reading their host slots."""
        self._read_last: list[int] = []
        """Dropped host slots that become free after the step being built, which may read them."""

    @property
    def num_used(self) -> int:
        """Number of slots that hold a block."""
        return self._next - len(self._returned)

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_used

    @property
    def num_obtainable(self) -> int:
        """Number of slots that are free or can be taken from a block."""
        return self.num_free + len(self._alone) + len(self._copies)

    def take_slot(self) -> int | None:
        """Return a free slot, or None.

        This method also returns None while an unwanted block has a slot, so that the caller reuses
        that slot before the pool takes more memory.
        """
        if self._returned:
            return self._returned.pop()
        if self._next == self.num_slots or self._alone.first_idle() is not None:
            return None
        self._next += 1
        return self._next - 1

    def return_slot(self, slot: int) -> None:
        self._returned.append(slot)

    def return_after_step(self, slots: list[int]) -> None:
        """Free slots once the step being built has run, because it may read them."""
        self._read_last += slots
        self.changes += 1

    def candidate(self) -> Block | None:
        """Return the next block to lose its slot: an unwanted block if there is one, otherwise a
        block that is also on the device, otherwise the least recently used block. Return None if no
        block can lose its slot."""
        idle = self._alone.first_idle()
        if idle is not None:
            return idle
        return next(iter(self._copies), next(iter(self._alone), None))

    def keep_host_only(self, block: Block) -> None:
        """Add an unreferenced block that lost its device slot."""
        self._copies.pop(block, None)
        self._alone.add(block)
        self.changes += 1

    def refer(self, block: Block) -> None:
        """Protect a host-only block from eviction, because it gained a reference."""
        self._alone.discard(block)
        self.changes += 1

    def read(self, block: Block) -> None:
        """Keep the host slot of a block until the step being built has swapped it in."""
        self._read.append(block)
        self.changes += 1

    def settle(self) -> None:
        """Record that the blocks that a submitted step swaps in are now on both the device and the
        host, and free the dropped host slots that the step read."""
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
