"""Window slots: slots of blocks in layer groups with a window, and in all after the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchinfer.engine.kv.eviction import EvictionOrder
from batchinfer.engine.kv.layer_groups import most_slots, num_outside_window
from batchinfer.engine.kv.prefix_index import Block, WindowSlot


class WindowSlots:
    """Allocates the window slots of blocks and counts their readers.

    A sequence's ``num_evicted`` is the number of leading blocks outside the window, for each window
    slot of a block.

    Args:
        windows: of each layer group; 0 is full attention and comes first.
        block_size: tokens per block.
        free: the pool's free slots.
        cached: the pool's unused slots that a lookup can find.
        take_slot: takes a free slot, evicting if necessary.
    """

    def __init__(
        self,
        windows: tuple[int, ...],
        block_size: int,
        free: list[int],
        cached: EvictionOrder[Block | WindowSlot],
        take_slot: Callable[[], int],
    ) -> None:
        self._all_windows = windows
        self.windows = windows[1:] if windows[0] == 0 else windows
        """Window of each window slot of a block; 0 is full attention."""
        self.num_shared = 0
        """Window slots used by more than one sequence."""
        self._block_size = block_size
        self._free_slots = free
        self._cached = cached
        self._take_slot = take_slot
        self._num_allocated = 0

    def num_evicted(self, num_tokens: int) -> tuple[int, ...]:
        """Leading blocks outside each window after ``num_tokens`` computed tokens."""
        return tuple(num_outside_window(num_tokens, w, self._block_size) for w in self.windows)

    def most_slots(self, num_tokens: int, num_new: int) -> int:
        """Most slots of one sequence until it has ``num_tokens``, ``num_new`` per step."""
        return most_slots(self._all_windows, self._block_size, num_tokens, num_new)

    def allocate(self, block: Block) -> None:
        """Give a new block its window slots."""
        block.window_slots = tuple(WindowSlot(block, self._take_slot()) for _ in self.windows)
        block.serial = self._num_allocated
        self._num_allocated += 1

    def acquire(self, block: Block, at: int, num_evicted: tuple[int, ...]) -> None:
        """Add a reader to the slots inside a sequence's windows of block ``at`` of its table."""
        for window_slot in live_slots(block, at, num_evicted):
            assert window_slot.slot >= 0
            if window_slot.readers == 0:
                self._cached.discard(window_slot)
            window_slot.readers += 1
            self.num_shared += window_slot.readers == 2

    def release(self, window_slot: WindowSlot) -> None:
        """Remove a reader whose window moved on, or that ended."""
        assert window_slot.readers > 0
        window_slot.readers -= 1
        if window_slot.readers == 1:
            self.num_shared -= 1
        elif window_slot.readers == 0:
            if window_slot.block.indexed:
                self._cached.add(window_slot)
            else:
                self.free(window_slot)

    def free(self, window_slot: WindowSlot) -> None:
        """Free a slot without readers."""
        self._cached.discard(window_slot)
        self._free_slots.append(window_slot.slot)
        window_slot.slot = -1

    def free_unneeded(self, block: Block) -> None:
        """Free the slots of a block that left the index, unless they are in use."""
        for window_slot in block.window_slots:
            if window_slot in self._cached:
                self.free(window_slot)

    def update_priority(self, block: Block) -> None:
        """Update the places of a block's slots after its future use changed."""
        for window_slot in block.window_slots:
            self._cached.update_priority(window_slot)


def live_slots(block: Block, at: int, num_evicted: tuple[int, ...]) -> Iterator[WindowSlot]:
    """The slots inside a sequence's windows of block ``at`` of its table."""
    if not num_evicted:
        return iter(block.window_slots)
    return (
        window_slot
        for window_slot, gone in zip(block.window_slots, num_evicted, strict=True)
        if at >= gone
    )


def holds_more(block: Block, other: Block) -> bool:
    """Whether a block has all window slots of another block with equal tokens, and more."""
    pairs = list(zip(block.window_slots, other.window_slots, strict=True))
    return all(own.slot >= 0 or window_slot.slot < 0 for own, window_slot in pairs) and any(
        own.slot >= 0 > window_slot.slot for own, window_slot in pairs
    )
