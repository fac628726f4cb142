"""The KV pool: reference counts of blocks, their slots, reuse and eviction.

In a model with several layer groups, a block has a slot in each group. ``Block.slot`` is the slot
in the first group if that group is full attention. ``Block.window_slots`` are the slots in the
other groups, or in all groups if every layer has a window. The prefix tree, references and copies
work on blocks. A window slot is freed separately from its block, once the slot is outside the
windows of all sequences that refer to the block. If the block is indexed, the slot is kept until
space is needed, because a later hit that ends soon after the block needs the slot again. If a slot
in the last window of a prefix was freed, a lookup finds only a shorter prefix (``prefix_hit.py``).
Blocks that are then computed again replace the incomplete blocks in the index. Blocks of a model
with windows are not swapped to the host yet.

A model without attention has no layer group, so its blocks have no slots. Blocks without slots are
only entries of the prefix index that lead to snapshots of recurrent state. A block without slots
leaves the index once no sequence uses the block and its subtree has no snapshot.

Blocks with reference counts and copy-on-write follow PagedAttention (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.engine.kv.eviction import EvictionOrder
from batchinfer.engine.kv.host_pool import HostPool
from batchinfer.engine.kv.pending_blocks import BlockCopies, PendingBlocks
from batchinfer.engine.kv.prefix_index import Block, PrefixIndex, PrefixMatch, WindowSlot
from batchinfer.engine.kv.state_slots import StateSlots
from batchinfer.engine.kv.window_slots import WindowSlots, holds_more, live_slots


class BlockPool:
    """Blocks, and the fixed number of device slots that hold them.

    A slot is free, cached (its block is indexed and unreferenced) or used. Any free or cached slot
    serves any sequence and group, so ``k`` blocks can be allocated whenever
    ``num_available >= k * slots_per_block``. Cached blocks are evicted in ``EvictionOrder``. An
    evicted block with a known future use moves to a host slot if possible, and is swapped in on its
    next use.

    Args:
        num_blocks: device slots in the pool.
        enable_prefix_caching: if false, nothing is indexed.
        windows: sliding window of each layer group; 0 = full attention, which comes first.
            Empty if no layer attends.
        slots_per_state: slots of a sequence's recurrent state.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        slots_per_state: int = 0,
    ) -> None:
        assert num_host_blocks == 0 or not any(windows), "blocks with windows are not swapped"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(block_size)
        self._num_own_shared = 0
        self.slots_per_block = len(windows)
        self.windows = windows
        self.has_own = windows[:1] == (0,)
        self._caching = enable_prefix_caching
        self.free = list(range(num_blocks - 1, -1, -1))
        self.cached: EvictionOrder[Block | WindowSlot] = EvictionOrder()
        self.window_slots = WindowSlots(
            windows, block_size, self.free, self.cached, self._take_slot
        )
        self.host = HostPool(num_host_blocks)
        self.states = StateSlots(
            slots_per_state,
            self.free,
            self._take_slot,
            self.update_priority,
            self._prune,
            self._copy_slots_out,
            self.host.return_after_step,
        )
        self.block_copies = BlockCopies()
        """Copies that run before the step being built."""
        self.pending = PendingBlocks()

    @property
    def num_shared(self) -> int:
        """Number of slots that more than one sequence uses."""
        return self._num_own_shared + self.window_slots.num_shared

    @property
    def num_cached(self) -> int:
        """Number of slots that no sequence uses, but that a prefix lookup can still find."""
        return len(self.cached) + self.states.num_cached

    @property
    def num_available(self) -> int:
        """Number of slots that can be allocated now."""
        return len(self.free) + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self) -> Block:
        """Return a new block. Requires ``num_available >= slots_per_block``."""
        block = Block(self._take_slot() if self.has_own else -1)
        block.ref_count = 1
        if self.window_slots.windows:
            self.window_slots.allocate(block)
        return block

    def acquire(self, block: Block, at: int = 0, num_evicted: tuple[int, ...] = ()) -> None:
        """Add a reference. If the block is only on the host, the caller must also swap it in.

        Args:
            at: index of the block in the table.
            num_evicted: for each window, the number of leading blocks outside the window.
        """
        if block.ref_count == 0:
            if block.slot >= 0:
                self.cached.discard(block)
            else:
                self.host.refer(block)
        block.ref_count += 1
        if block.ref_count == 2:
            self._num_own_shared += self.has_own
        if block.window_slots:
            self.window_slots.acquire(block, at, num_evicted)

    def swap_in(self, block: Block) -> None:
        """Give a referenced block a device slot, into which the next step copies its host slot.

        Requires ``num_available >= 1``.
        """
        assert block.ref_count > 0
        block.slot = self._take_slot()
        self.block_copies.ins.append((block.host_slot, block.slot))
        self.host.read(block)
        self.pending.moved.add(block)

    def copy(self, source: Block, destination: Block) -> None:
        """Have the next step copy a referenced block, which may be on the host, to a new block."""
        for window_slot, copy_slot in zip(
            source.window_slots, destination.window_slots, strict=True
        ):
            self.block_copies.within.append((window_slot.slot, copy_slot.slot))
        if source.slot >= 0:
            self.block_copies.within.append((source.slot, destination.slot))
        elif source.host_slot >= 0:
            self.block_copies.ins.append((source.host_slot, destination.slot))

    def take_copies(self) -> BlockCopies:
        """Return and clear the copies of the step just built."""
        copies, self.block_copies = self.block_copies, BlockCopies()
        self.states.release_sources()
        return copies

    def release(self, blocks: Iterable[Block], num_evicted: tuple[int, ...] = ()) -> None:
        """Drop a reference to each block of a table.

        The last blocks are released first, so that they are evicted before the blocks of their
        prefixes.

        Args:
            blocks: the blocks in the table's order.
            num_evicted: for each window, the number of leading blocks outside the window.
        """
        table = list(blocks)
        for at in range(len(table) - 1, -1, -1):
            block = table[at]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 1:
                self._num_own_shared -= self.has_own
            elif block.ref_count == 0:
                if block.slot < 0:
                    if block.host_slot >= 0:
                        self.host.keep_host_only(block)
                elif block.indexed:
                    self.cached.add(block)
                else:
                    self.free.append(block.slot)
            if block.slot < 0 or block.window_slots:
                for window_slot in live_slots(block, at, num_evicted):
                    self.window_slots.release(window_slot)
                self._prune(block)

    def update_priority(self, block: Block) -> None:
        """Update a block's place in the eviction orders after its future use changed."""
        self.cached.update_priority(block)
        self.window_slots.update_priority(block)
        self.host.update_priority(block)

    def match(self, key: bytes, adapter: int = 0) -> PrefixMatch:
        return self.index.match(key, adapter)

    def insert_block(self, parent: Block, block: Block, key: bytes) -> Block | None:
        """Index a block that the step being built fills with the tokens of ``key``.

        Returns:
            The indexed block for ``key``, which is the parent of the next block; None if
            ``parent`` was evicted.
        """
        if not (parent.indexed or self.index.is_root(parent)):
            return None
        if block.parent is parent and block.key.startswith(key):
            return block
        entry = self.index.insert(parent, block, key)
        if entry is not block and holds_more(block, entry):
            self.states.drop_of([entry])  # no snapshot needs a block that lacks slots
            self.index.replace(entry, block)
            self.update_priority(block)
            self._free_unneeded(entry)
            entry = block
        if entry is block:
            self.pending.filled.add(block)
        return entry

    def entry_below(self, blocks: list[Block], adapter: int = 0) -> Block | None:
        """Return the index entry that is the parent of the block after the hit ``blocks``; None
        without prefix caching."""
        if not self._caching:
            return None
        return blocks[-1] if blocks else self.index.root(adapter)

    def mark_filled(self, block: Block) -> None:
        """Mark an indexed block as filled by a previous step."""
        if block in self.pending.filled:
            self.index.settle(block)
            self.pending.mark_filled(block)

    def commit_fills(self) -> None:
        """Make the blocks that a submitted step fills available to later steps."""
        for block in self.pending.filled:
            if block.indexed:
                self.index.settle(block)
        self.pending.push_step()
        self.host.settle()

    def confirm(self) -> None:
        """Confirm the blocks of the oldest submitted step, which succeeded."""
        self.pending.commit_oldest()

    def rollback(self) -> None:
        """Evict the blocks that a failed step and later steps should have filled or moved."""
        for block in self.pending.drain():
            if block.indexed:
                self.evict_subtree(block)
        self.states.drop_all()
        self.host.settle()
        self.block_copies = BlockCopies()

    def evict_subtree(self, block: Block) -> None:
        """Remove a block and its descendants from the index and the host."""
        parent = block.parent
        if self.states.snapshots:
            self.states.drop_of(self.index.subtree(block))
        for removed in self.index.remove(block):
            self._free_unneeded(removed)
            if removed.host_slot >= 0:
                self.host.drop(removed)
        if parent is not None:
            self._prune(parent)

    def evict_all(self) -> None:
        """Remove all blocks from the index and the host. Requires that no block is in use."""
        assert self.num_used == 0, "blocks are in use"
        for block in self.index.first_blocks():
            self.evict_subtree(block)

    def _take_slot(self) -> int:
        if not self.free and not (self.cached.first_idle() is None and self.states.evict()):
            self._evict(self.cached.first())
        return self.free.pop()

    def _free_unneeded(self, block: Block) -> None:
        """Free the unused slots of a block that was removed from the index."""
        if block in self.cached:
            self.cached.discard(block)
            self.free.append(block.slot)
        self.window_slots.free_unneeded(block)

    def _prune(self, block: Block) -> None:
        """Remove a block from the index if it has no slots and no descendants, and likewise each
        ancestor in turn. Without layer groups, a block that leads to a snapshot stays."""
        while (
            block.indexed
            and block.ref_count == 0
            and block.children is None
            and (block.num_kept == 0 or self.slots_per_block > 0)
            and max(block.slot, block.host_slot) < 0
            and all(window_slot.slot < 0 for window_slot in block.window_slots)
        ):
            parent = block.parent
            assert parent is not None
            self.states.drop_of([block])
            self.index.remove(block)
            block = parent

    def _evict(self, block: Block | WindowSlot) -> None:
        """Free a cached block's device slot. A block that is already on the host stays there. A
        wanted block is copied to the host if possible."""
        if isinstance(block, WindowSlot):
            self.window_slots.free(block)
            self._prune(block.block)
            return
        if block.wanted and block.host_slot < 0:
            self._copy_out(block)
        if block.host_slot >= 0:
            self.cached.discard(block)
            self.free.append(block.slot)
            block.slot = -1
            self.host.keep_host_only(block)
        elif block.indexed:
            self.evict_subtree(block)

    def _copy_out(self, block: Block) -> None:
        """Give a block a host slot if possible; the next step then copies the block to the host."""
        slot = self._take_host_slot()
        if slot is None:
            return
        if not block.indexed:  # taking the host slot evicted an ancestor of the block
            self.host.return_slot(slot)
            return
        block.host_slot = slot
        self.block_copies.outs.append((block.slot, slot))
        self.pending.moved.add(block)

    def _copy_slots_out(self, slots: list[int]) -> list[int]:
        """Have the next step copy slots to the host; return their host slots, or an empty list if
        the host has too few."""
        host_slots = list[int]()
        if len(slots) > self.host.num_obtainable:  # do not evict blocks needlessly
            return host_slots
        while len(host_slots) < len(slots):
            host_slot = self._take_host_slot()
            if host_slot is None:
                break
            host_slots.append(host_slot)
        if len(host_slots) < len(slots):
            for host_slot in host_slots:
                self.host.return_slot(host_slot)
            return []
        self.block_copies.outs += zip(slots, host_slots, strict=True)
        self.host.changes += 1
        return host_slots

    def _take_host_slot(self) -> int | None:
        """Return a free host slot, or take one from another block if none is free; return None if
        no block can lose its slot."""
        slot = self.host.take_slot()
        if slot is not None:
            return slot
        other = self.host.candidate()
        if other is None:
            return None
        if other.slot >= 0:
            self.host.drop(other)
        else:
            self.evict_subtree(other)
        return self.host.take_slot()
