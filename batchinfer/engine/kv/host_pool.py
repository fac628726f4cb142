"""Host slots, for wanted blocks that lose their device slots."""

from __future__ import annotations

from collections import OrderedDict

from batchinfer.engine.kv.eviction import EvictionOrder
from batchinfer.engine.kv.prefix_index import Block


class HostPool:
    """Blocks with host slots, and the order in which they lose them.

    Every block with a host slot is indexed. One that is also on the device may lose its host slot
    at no loss; one that is not is lost with it.

    Args:
        num_slots: blocks that fit; memory of those never used is never touched.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.changes = 0
        """Number of changes to what is on the host alone."""
        self._next = 0
        self._returned: list[int] = []
        self._alone: EvictionOrder[Block] = EvictionOrder()
        """Unreferenced blocks without a device slot."""
        self._copies: OrderedDict[Block, None] = OrderedDict()
        """Blocks with a device slot too."""
        self._read: list[Block] = []
        """Blocks that come back in the step being built, which reads their host slots."""
        self._read_last: list[int] = []
        """Slots of such blocks that were dropped since: they hold nothing after that step."""

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return self._next - len(self._returned)

    def take_slot(self) -> int | None:
        """A slot that holds nothing, if there is one.

        None also as long as a block holds one that nobody wants: before more memory is touched,
        that serves again.
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
        """The block to give up its slot next: one nobody wants, else a copy, else the oldest."""
        idle = self._alone.first_idle()
        if idle is not None:
            return idle
        return next(iter(self._copies), next(iter(self._alone), None))

    def keep_host_only(self, block: Block) -> None:
        """File an unreferenced block that lost its device slot."""
        self._copies.pop(block, None)
        self._alone.add(block)
        self.changes += 1

    def refer(self, block: Block) -> None:
        """Protect a block on the host only that is referred to now."""
        self._alone.discard(block)
        self.changes += 1

    def read(self, block: Block) -> None:
        """Note a block that the step being built swaps in; its host slot stays until then."""
        self._read.append(block)
        self.changes += 1

    def settle(self) -> None:
        """File blocks swapped in by a submitted step; they keep host slots while there is room."""
        for block in self._read:
            if block.slot >= 0 and block.host_slot >= 0:
                self._copies[block] = None
        self._read.clear()
        self._returned += self._read_last
        self._read_last.clear()

    def update_priority(self, block: Block) -> None:
        """Move a block, after it may have become wanted or unwanted."""
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
