"""Slots of blocks in layer groups with a window, and in all groups after the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import ge

from batchinfer.engine.kv.eviction import EvictionOrder
from batchinfer.engine.kv.layer_groups import most_slots, num_outside_window
from batchinfer.engine.kv.prefix_index import Block, WindowSlot


class WindowSlots:
    """Allocates the window slots of blocks and counts their readers.

    ``Sequence.num_evicted`` has the number of leading blocks outside the window, for each window
    slot of a block.

    Args:
        windows: window of each layer group; 0 = full attention, which comes first.
            Empty if no layer attends.
        cached: the pool's unused slots that a lookup can find.
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
        self.windows = windows[1:] if windows[:1] == (0,) else windows
        """Window of each window slot of a block; 0 = full attention."""
        self.num_shared = 0
        """Number of window slots that more than one sequence uses."""
        self._block_size = block_size
        self._free_slots = free
        self._cached = cached
        self._take_slot = take_slot
        self._num_allocated = 0

    def num_evicted(self, num_tokens: int) -> tuple[int, ...]:
        """Return the number of leading blocks outside each window after ``num_tokens`` tokens."""
        return tuple(num_outside_window(num_tokens, w, self._block_size) for w in self.windows)

    def most_slots(self, num_tokens: int, num_new: int) -> int:
        """Return the maximum number of slots that a sequence holds until it has ``num_tokens``, if
        a step computes up to ``num_new`` tokens."""
        return most_slots(self._all_windows, self._block_size, num_tokens, num_new)

    def allocate(self, block: Block) -> None:
        block.window_slots = tuple(WindowSlot(block, self._take_slot()) for _ in self.windows)
        block.serial = self._num_allocated
        self._num_allocated += 1

    def acquire(self, block: Block, at: int, num_evicted: tuple[int, ...]) -> None:
        """Add a reader to the slots of block ``at`` of a table that are inside their windows."""
        for window_slot in live_slots(block, at, num_evicted):
            assert window_slot.slot >= 0
            if window_slot.readers == 0:
                self._cached.discard(window_slot)
            window_slot.readers += 1
            self.num_shared += window_slot.readers == 2

    def release(self, window_slot: WindowSlot) -> None:
        """Remove a reader, because a sequence finished or its window moved past the slot."""
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
        self._cached.discard(window_slot)
        self._free_slots.append(window_slot.slot)
        window_slot.slot = -1

    def free_unneeded(self, block: Block) -> None:
        """Free the unused slots of a block that was removed from the index."""
        for window_slot in block.window_slots:
            if window_slot in self._cached:
                self.free(window_slot)

    def update_priority(self, block: Block) -> None:
        """Update the places of a block's slots after its future use changed."""
        for window_slot in block.window_slots:
            self._cached.update_priority(window_slot)


def live_slots(block: Block, at: int, num_evicted: tuple[int, ...]) -> Iterator[WindowSlot]:
    """Iterate over the slots of block ``at`` of a table, except slots outside their windows."""
    if not num_evicted:
        return iter(block.window_slots)
    return (
        window_slot
        for window_slot, evicted in zip(block.window_slots, num_evicted, strict=True)
        if at >= evicted
    )


def holds_more(block: Block, other: Block) -> bool:
    """Return true if ``block`` has all window slots that ``other`` has, and at least one more."""
    has = [slot.slot >= 0 for slot in block.window_slots]
    other_has = [slot.slot >= 0 for slot in other.window_slots]
    return has != other_has and all(map(ge, has, other_has))
