"""Pool slots of recurrent states, which sequences share until one of them computes."""

from __future__ import annotations

from collections.abc import Callable

from batchinfer.engine.kv.pending_blocks import Pairs


class RecurrentState:
    """The slots of the recurrent state of one or more sequences with the same computed tokens."""

    __slots__ = ("ref_count", "slots")

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots
        self.ref_count = 1


class StateSlots:
    """Allocates slots for recurrent states.

    A step updates a state in place, so sequences that fork share it only until their next step:
    then each but the last copies it (copy-on-write).

    Args:
        slots_per_state: 0: the model has no recurrent layers.
        free: the pool's free slots.
        take_slot: takes a free slot, evicting if necessary.
    """

    def __init__(self, slots_per_state: int, free: list[int], take_slot: Callable[[], int]) -> None:
        self.slots_per_state = slots_per_state
        self._free = free
        self._take_slot = take_slot
        self.num_states = 0
        """States in use."""

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return self.num_states * self.slots_per_state

    def allocate(self) -> RecurrentState:
        """A new state, undefined until its sequence computes its first token. Requires
        ``slots_per_state`` available slots."""
        self.num_states += 1
        return RecurrentState([self._take_slot() for _ in range(self.slots_per_state)])

    def acquire(self, state: RecurrentState) -> None:
        """Add a reference."""
        state.ref_count += 1

    def release(self, state: RecurrentState) -> None:
        """Drop a reference; the last one frees the slots."""
        assert state.ref_count > 0
        state.ref_count -= 1
        if state.ref_count == 0:
            self._free += state.slots
            self.num_states -= 1

    def copy(self, shared: RecurrentState, copies: Pairs) -> RecurrentState:
        """Replace a reference to a shared state by a new state, which the next step copies.

        Args:
            copies: takes pairs of (source slot, destination slot).
        """
        assert shared.ref_count > 1
        own = self.allocate()
        copies += zip(shared.slots, own.slots, strict=True)
        self.release(shared)
        return own
