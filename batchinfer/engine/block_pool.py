"""The KV pool's blocks: who holds them, which are free, which can be reused, which are on the host.

Blocks with reference counts and copy-on-write follow PagedAttention (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.engine.block_copies import BlockCopies
from batchinfer.engine.eviction import EvictionOrder
from batchinfer.engine.host_pool import HostPool
from batchinfer.engine.prefix_index import Block, PrefixIndex, PrefixMatch
from batchinfer.engine.unconfirmed import Unconfirmed


class BlockPool:
    """Every block is free, cached (unreferenced, indexed) or used (referenced).

    Any free or cached block serves any sequence, so ``k`` blocks are granted whenever
    ``num_available >= k``. Cached blocks are evicted as ``EvictionOrder`` says. One that is wanted
    moves to a host slot, if there is one, and is found there; whoever needs it brings it back.

    Args:
        num_blocks: device slots in the pool.
        block_size: tokens per block.
        enable_prefix_caching: when false nothing is indexed and nothing is found.
        num_host_blocks: host slots.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(block_size)
        self.num_shared = 0
        """Blocks with more than one reference."""
        self._caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionOrder()
        self.host = HostPool(num_host_blocks)
        self.copies = BlockCopies()
        """What the step being built copies."""
        self._unconfirmed = Unconfirmed()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that a prefix lookup can still find."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks referenced by sequences."""
        return self.num_blocks - self.num_available

    def allocate(self) -> Block:
        """A block nobody else refers to. Needs ``num_available >= 1``."""
        block = Block(self._take_slot())
        block.ref_count = 1
        return block

    def acquire(self, block: Block) -> None:
        """Add a reference. A block that is on the host only has to be brought back besides."""
        if block.ref_count == 0:
            if block.slot >= 0:
                self._cached.discard(block)
            else:
                self.host.refer(block)
        block.ref_count += 1
        if block.ref_count == 2:
            self.num_shared += 1

    def bring_back(self, block: Block) -> None:
        """Give a referenced block a device slot, filled from its host slot by the next step.

        Needs ``num_available >= 1``.
        """
        assert block.ref_count > 0
        block.slot = self._take_slot()
        self.copies.ins.append((block.host_slot, block.slot))
        self.host.read(block)
        self._unconfirmed.moved.add(block)

    def copy(self, source: Block, destination: Block) -> None:
        """Let the next step copy a referenced block, from wherever it is, to one just allocated."""
        if source.slot >= 0:
            self.copies.within.append((source.slot, destination.slot))
        else:
            self.copies.ins.append((source.host_slot, destination.slot))

    def take_copies(self) -> BlockCopies:
        """What the step that was just built copies."""
        copies, self.copies = self.copies, BlockCopies()
        return copies

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop a reference to each block of a table, given in the table's order.

        The last blocks go first: they are evicted before the prefixes they continue.
        """
        for block in reversed(list(blocks)):
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 1:
                self.num_shared -= 1
            elif block.ref_count == 0:
                if not block.indexed:
                    self._free.append(block.slot)
                elif block.slot >= 0:
                    self._cached.add(block)
                else:
                    self.host.keep_alone(block)

    def refile(self, block: Block) -> None:
        """Whether a block is wanted may have changed."""
        self._cached.refile(block)
        self.host.refile(block)

    def match(self, key: bytes) -> PrefixMatch:
        """Blocks holding the longest known prefix of ``key``."""
        return self.index.match(key)

    def enter(self, parent: Block, block: Block, key: bytes) -> Block | None:
        """Index a block that the step being built fills with the tokens of ``key``.

        Returns:
            The block below which the next one goes; None when the parent was evicted meanwhile.
        """
        if not (parent.indexed or parent is self.index.root):
            return None
        if block.parent is parent and block.key.startswith(key):
            return block
        entry = self.index.insert(parent, block, key)
        if entry is block:
            self._unconfirmed.filled.add(block)
        return entry

    def entry_below(self, blocks: list[Block]) -> Block | None:
        """Where to index what follows a hit of ``blocks``; None when nothing is indexed."""
        if not self._caching:
            return None
        return blocks[-1] if blocks else self.index.root

    def settle_block(self, block: Block) -> None:
        """What an entered block holds is there already."""
        if block in self._unconfirmed.filled:
            self.index.settle(block)
            self._unconfirmed.settle_block(block)

    def settle(self) -> None:
        """The step was submitted: what it fills is there for every step after it."""
        for block in self._unconfirmed.filled:
            if block.indexed:
                self.index.settle(block)
        self._unconfirmed.submit()
        self.host.settle()

    def confirm(self) -> None:
        """The oldest submitted step ran: what it filled or moved stays."""
        self._unconfirmed.confirm()

    def revoke(self) -> None:
        """A step failed: what it and those after it were to fill or move must not be found."""
        for block in self._unconfirmed.take_all():
            if block.indexed:
                self.forget(block)
        self.host.settle()
        self.copies = BlockCopies()

    def forget(self, block: Block) -> None:
        """Take a block, and what continues it, out of the index and off the host."""
        for removed in self.index.remove(block):
            if removed in self._cached:
                self._cached.discard(removed)
                self._free.append(removed.slot)
            if removed.host_slot >= 0:
                self.host.drop(removed)

    def _take_slot(self) -> int:
        if not self._free:
            self._evict(self._cached.first())
        return self._free.pop()

    def _evict(self, block: Block) -> None:
        """Take a cached block's device slot; it stays on the host if it is there or wanted."""
        if block.wanted and block.host_slot < 0:
            self._copy_out(block)
        if block.host_slot >= 0:
            self._cached.discard(block)
            self._free.append(block.slot)
            block.slot = -1
            self.host.keep_alone(block)
        elif block.indexed:
            self.forget(block)

    def _copy_out(self, block: Block) -> None:
        """Give a block a host slot, filled by the next step, if one can be had."""
        slot = self.host.take_slot()
        if slot is None:
            other = self.host.candidate()
            if other is None:
                return
            if other.slot >= 0:
                self.host.drop(other)
            else:
                self.forget(other)
            slot = self.host.take_slot()
            assert slot is not None
        if not block.indexed:  # it continued the one that was forgotten
            self.host.return_slot(slot)
            return
        block.host_slot = slot
        self.copies.outs.append((block.slot, slot))
        self._unconfirmed.moved.add(block)

    def check_invariants(self, tables: Iterable[list[Block]]) -> None:
        """Assert that counts, slots and index agree with ``tables``, all block tables alive."""
        counts: dict[Block, int] = {}
        for table in tables:
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        assert all(block.ref_count == count for block, count in counts.items())
        slots = [*self._free, *(b.slot for b in self._cached), *(b.slot for b in counts)]
        assert sorted(slots) == list(range(self.num_blocks)), "a slot is lost or held twice"
        assert self.num_used == len(counts)
        assert self.num_shared == sum(count > 1 for count in counts.values())
        indexed = list(self.index.blocks())
        for block in indexed:
            assert (block.ref_count > 0) == (block in counts)
            assert (block in self._cached) == (block.ref_count == 0 and block.slot >= 0)
        assert all(block.indexed for block in self._cached)
        assert all(block.indexed or block.host_slot < 0 for block in counts)
        self._cached.check_invariants()
        self.host.check_invariants(indexed)
        self.index.check_invariants(self._unconfirmed.filled)
