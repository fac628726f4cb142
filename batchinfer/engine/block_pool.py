"""The KV pool's blocks: who holds them, which are free, which can be reused, which are on the host.

Of a model with several layer groups a block has a slot in each: in the first group its own where
that is full attention, in the others (all, where every layer has a window) its ``parts``. The tree
of prefixes, references and copies are of blocks. A part is given up apart from its block: when it
left the windows of all sequences that refer to the block, its slot can serve another. If the block
is indexed that waits until the room is needed, because a prefix that ends within a window after it
needs the part again. A prefix found whose last window lacks a part is found as far as none does
(``hit.py``); what is computed again then takes the place in the index of what lacks it. Blocks of
a model with windows have no host slots yet.

Blocks with reference counts and copy-on-write follow PagedAttention (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from batchinfer.engine.block_copies import BlockCopies
from batchinfer.engine.eviction import EvictionOrder
from batchinfer.engine.host_pool import HostPool
from batchinfer.engine.layer_groups import left_window, most_in_window
from batchinfer.engine.prefix_index import Block, GroupSlot, PrefixIndex, PrefixMatch
from batchinfer.engine.unconfirmed import Unconfirmed


class BlockPool:
    """Every slot is free, cached (indexed, needed by nobody now) or used.

    Any free or cached slot serves any sequence and group, so ``k`` blocks are granted whenever
    ``num_available >= k * slots_per_block``. Cached blocks are evicted as ``EvictionOrder`` says.
    One that is wanted moves to a host slot, if there is one, and is found there; whoever needs it
    brings it back.

    Args:
        num_blocks: device slots in the pool.
        block_size: tokens per block.
        enable_prefix_caching: when false nothing is indexed and nothing is found.
        num_host_blocks: host slots.
        windows: of each layer group; 0 is full attention and comes first.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        assert num_host_blocks == 0 or not any(windows), "blocks with windows are not swapped"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(block_size)
        self.num_shared = 0
        """Slots that more than one sequence needs."""
        self.slots_per_block = len(windows)
        self.windows = windows
        self._has_own = windows[0] == 0
        self.part_windows = windows[self._has_own :]
        """Windows of the groups in which blocks have parts."""
        self._num_made = 0
        self._caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: EvictionOrder[Block | GroupSlot] = EvictionOrder()
        self.host = HostPool(num_host_blocks)
        self.copies = BlockCopies()
        """What the step being built copies."""
        self._unconfirmed = Unconfirmed()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Slots nobody needs now that a prefix lookup can still find."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Slots that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Slots that sequences need."""
        return self.num_blocks - self.num_available

    def left(self, num_tokens: int) -> tuple[int, ...]:
        """Leading blocks that left each part's window when so many tokens are computed."""
        return tuple(left_window(num_tokens, w, self.block_size) for w in self.part_windows)

    def most_slots(self, num_tokens: int, num_new: int) -> int:
        """Most slots of one sequence on its way to ``num_tokens``, ``num_new`` of them a step."""
        blocks, size = -(-num_tokens // self.block_size), self.block_size
        return sum(
            min(blocks, most_in_window(w, size, num_new)) if w else blocks for w in self.windows
        )

    def allocate(self) -> Block:
        """A block nobody else refers to. Needs ``num_available >= slots_per_block``."""
        block = Block(self._take_slot() if self._has_own else -1)
        block.ref_count = 1
        if self.part_windows:
            block.parts = tuple(GroupSlot(block, self._take_slot()) for _ in self.part_windows)
            block.serial = self._num_made
            self._num_made += 1
        return block

    def acquire(self, block: Block, at: int = 0, left: tuple[int, ...] = ()) -> None:
        """Add a reference. A block that is on the host only has to be brought back besides.

        Args:
            block: number ``at`` of a table.
            left: leading blocks of the table that left each part's window already.
        """
        if block.ref_count == 0:
            if block.slot >= 0:
                self._cached.discard(block)
            else:
                self.host.refer(block)
        block.ref_count += 1
        if block.ref_count == 2 and self._has_own:
            self.num_shared += 1
        if not block.parts:
            return
        for part in _needed(block, at, left):
            assert part.slot >= 0
            if part.readers == 0:
                self._cached.discard(part)
            part.readers += 1
            self.num_shared += part.readers == 2

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
        for part, own in zip(source.parts, destination.parts, strict=True):
            self.copies.within.append((part.slot, own.slot))
        if source.slot >= 0:
            self.copies.within.append((source.slot, destination.slot))
        elif source.host_slot >= 0:
            self.copies.ins.append((source.host_slot, destination.slot))

    def take_copies(self) -> BlockCopies:
        """What the step that was just built copies."""
        copies, self.copies = self.copies, BlockCopies()
        return copies

    def release(self, blocks: Iterable[Block], left: tuple[int, ...] = ()) -> None:
        """Drop a reference to each block of a table, given in the table's order.

        The last blocks go first: they are evicted before the prefixes they continue.

        Args:
            blocks: the table.
            left: leading blocks that left each part's window already.
        """
        table = list(blocks)
        for at in range(len(table) - 1, -1, -1):
            block = table[at]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 1:
                self.num_shared -= self._has_own
            elif block.ref_count == 0:
                if block.slot < 0:
                    if block.host_slot >= 0:
                        self.host.keep_alone(block)
                elif block.indexed:
                    self._cached.add(block)
                else:
                    self._free.append(block.slot)
            if block.parts:
                for part in _needed(block, at, left):
                    self.leave(part)
                self._prune(block)

    def leave(self, part: GroupSlot) -> None:
        """A part left the window of a sequence that refers to its block."""
        assert part.readers > 0
        part.readers -= 1
        if part.readers == 1:
            self.num_shared -= 1
        elif part.readers == 0:
            if part.block.indexed:
                self._cached.add(part)
            else:
                self._give_up(part)

    def refile(self, block: Block) -> None:
        """Whether a block is wanted may have changed."""
        self._cached.refile(block)
        for part in block.parts:
            self._cached.refile(part)
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
        if entry is not block and _holds_more(block, entry):
            self.index.replace(entry, block)
            self._free_unneeded(entry)
            entry = block
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
        parent = block.parent
        for removed in self.index.remove(block):
            self._free_unneeded(removed)
            if removed.host_slot >= 0:
                self.host.drop(removed)
        if block.parts and parent is not None:
            self._prune(parent)

    def _take_slot(self) -> int:
        if not self._free:
            self._evict(self._cached.first())
        return self._free.pop()

    def _free_unneeded(self, block: Block) -> None:
        """A block left the index: what of it was kept to be found is free."""
        if block in self._cached:
            self._cached.discard(block)
            self._free.append(block.slot)
        for part in block.parts:
            if part in self._cached:
                self._cached.discard(part)
                self._give_up(part)

    def _give_up(self, part: GroupSlot) -> None:
        self._free.append(part.slot)
        part.slot = -1

    def _prune(self, block: Block) -> None:
        """Take a block out of the index that holds nothing, and leads to nothing that does."""
        while (
            block.indexed
            and block.ref_count == 0
            and block.children is None
            and max(block.slot, block.host_slot) < 0
            and all(part.slot < 0 for part in block.parts)
        ):
            parent = block.parent
            assert parent is not None
            self.index.remove(block)
            block = parent

    def _evict(self, block: Block | GroupSlot) -> None:
        """Take a cached block's device slot; it stays on the host if it is there or wanted."""
        if isinstance(block, GroupSlot):
            self._cached.discard(block)
            self._give_up(block)
            self._prune(block.block)
            return
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

    def check_invariants(
        self, tables: Iterable[list[Block]], left: Iterable[tuple[int, ...]] = ()
    ) -> None:
        """Assert that counts, slots and index agree with ``tables``, all block tables alive.

        Args:
            tables: the tables.
            left: of each, the leading blocks that left each part's window; none given: none did.
        """
        counts: Counter[Block] = Counter()
        readers: Counter[GroupSlot] = Counter()
        for table, gone in zip_longest(tables, left, fillvalue=()):
            counts.update(table)
            readers.update(part for at, b in enumerate(table) for part in _needed(b, at, gone))
        assert all(block.ref_count == count for block, count in counts.items())
        assert all(part.readers == count for part, count in readers.items())
        held: list[Block | GroupSlot] = [*(b for b in counts if self._has_own), *readers]
        slots = [*self._free, *(b.slot for b in self._cached), *(b.slot for b in held)]
        assert sorted(slots) == list(range(self.num_blocks)), "a slot is lost or held twice"
        assert self.num_used == len(held)
        own = sum(count > 1 for count in counts.values()) if self._has_own else 0
        assert self.num_shared == own + sum(count > 1 for count in readers.values())
        indexed = list(self.index.blocks())
        for block in indexed:
            assert (block.ref_count > 0) == (block in counts)
            assert (block in self._cached) == (block.ref_count == 0 and block.slot >= 0)
            for part in block.parts:
                assert (part in self._cached) == (part.readers == 0 and part.slot >= 0)
            holds = max(block.slot, block.host_slot, *(part.slot for part in block.parts)) >= 0
            assert holds or block.ref_count or block.children, "an entry leads to nothing"
        for place in self._cached:
            assert (place.block if isinstance(place, GroupSlot) else place).indexed
        assert all(block.indexed or block.host_slot < 0 for block in counts)
        self._cached.check_invariants()
        self.host.check_invariants(indexed)
        self.index.check_invariants(self._unconfirmed.filled)


def _needed(block: Block, at: int, left: tuple[int, ...]) -> Iterator[GroupSlot]:
    """The parts that a sequence needs of block ``at`` of its table."""
    if not left:
        return iter(block.parts)
    return (part for part, gone in zip(block.parts, left, strict=True) if at >= gone)


def _holds_more(block: Block, other: Block) -> bool:
    """Whether a block has all parts that another of the same tokens has, and more."""
    ours, theirs = ([part.slot >= 0 for part in one.parts] for one in (block, other))
    return ours != theirs and all(map(operator.ge, ours, theirs))
