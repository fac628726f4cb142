"""The KV pool's blocks: who holds them, which are free, which can be reused.

Blocks with reference counts and copy-on-write follow PagedAttention (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from batchinfer.engine.prefix_index import Block, PrefixIndex, PrefixMatch


class BlockPool:
    """Every block is free, cached (unreferenced, indexed) or used (referenced).

    Any free or cached block serves any sequence, so ``k`` blocks are granted whenever
    ``num_available >= k``. Cached blocks are evicted least recently used first.

    Args:
        num_blocks: device slots in the pool.
        block_size: tokens per block.
        enable_prefix_caching: when false nothing is indexed and nothing is found.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(block_size)
        self.num_shared = 0
        """Blocks with more than one reference."""
        self._caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[Block, None] = OrderedDict()
        self._in_flight: set[Block] = set()
        """Indexed blocks that the step being built fills."""
        self._unconfirmed: deque[set[Block]] = deque()
        """Indexed blocks that each submitted step fills, oldest step first."""

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
        if not self._free:
            self.forget(next(iter(self._cached)))
        block = Block(self._free.pop())
        block.ref_count = 1
        return block

    def acquire(self, block: Block) -> None:
        """Add a reference."""
        if block.ref_count == 0:
            del self._cached[block]
        block.ref_count += 1
        if block.ref_count == 2:
            self.num_shared += 1

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
                if block.indexed:
                    self._cached[block] = None
                else:
                    self._free.append(block.slot)

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
        entry = self.index.insert(parent, block, key)
        if entry is block:
            self._in_flight.add(block)
        return entry

    def entry_below(self, blocks: list[Block]) -> Block | None:
        """Where to index what follows a hit of ``blocks``; None when nothing is indexed."""
        if not self._caching:
            return None
        return blocks[-1] if blocks else self.index.root

    def settle_block(self, block: Block) -> None:
        """What an entered block holds is there already."""
        if block in self._in_flight:
            self._in_flight.remove(block)
            self.index.settle(block)
            if self._unconfirmed:
                self._unconfirmed[-1].add(block)

    def settle(self) -> None:
        """The step was submitted: what it fills is there for every step after it."""
        for block in self._in_flight:
            if block.indexed:
                self.index.settle(block)
        self._unconfirmed.append(self._in_flight)
        self._in_flight = set()

    def confirm(self) -> None:
        """The oldest submitted step ran: what it filled stays."""
        self._unconfirmed.popleft()

    def revoke(self) -> None:
        """A step failed: what it and those after it were to fill must not be found."""
        for blocks in (*self._unconfirmed, self._in_flight):
            for block in blocks:
                if block.indexed:
                    self.forget(block)
        self._unconfirmed.clear()
        self._in_flight.clear()

    def forget(self, block: Block) -> None:
        """Take a block, and what continues it, out of the index."""
        for removed in self.index.remove(block):
            if removed.ref_count == 0 and removed in self._cached:
                del self._cached[removed]
                self._free.append(removed.slot)

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
        for block in self.index.blocks():
            assert (block.ref_count > 0) == (block in counts)
            assert (block in self._cached) == (block.ref_count == 0)
        assert all(block.indexed for block in self._cached)
        self.index.check_invariants(self._in_flight)
