"""Pool slots for the recurrent states of running sequences and for snapshots for later rows.

A step updates a state in place. Sequences that fork therefore share a state only until their next
step, when all but the last of them copy it (copy-on-write). A snapshot also holds a reference to a
state, so the sequence copies the state before its next step. A snapshot belongs to a position in an
indexed block. A later row that shares the prefix up to this position starts from the snapshot. Rows
are planned window by window, so the positions where rows diverge are known, and snapshots are taken
only at these positions. A snapshot is dropped after its last use. When the pool needs its slots,
its state moves to the host, or the snapshot is dropped if the host has no space.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from batchinfer.engine.kv.pending_blocks import BlockCopies, Pairs
from batchinfer.engine.kv.prefix_index import Block, RecurrentState, StateSnapshot


class StateSlots:
    """Allocates slots for recurrent states and keeps snapshots.

    Args:
        slots_per_state: slots of one state; 0 for a model without recurrent layers.
        take_slot: takes a free slot, evicting if necessary.
        update_priority: called with a block when its subtree in the index gets its first snapshot
            or loses its last.
        prune: called with the block of a dropped snapshot; the block may no longer be needed.
        copy_out: has the next step copy slots to the host; returns their host slots, or an empty
            list if the host has no space. May evict blocks, and so drop snapshots.
    """

    def __init__(
        self,
        slots_per_state: int,
        free: list[int],
        take_slot: Callable[[], int],
        update_priority: Callable[[Block], None],
        prune: Callable[[Block], None],
        copy_out: Callable[[list[int]], list[int]],
        return_host_slots: Callable[[list[int]], None],
    ) -> None:
        self.slots_per_state = slots_per_state
        self._free = free
        self._take_slot = take_slot
        self._update_priority = update_priority
        self._prune = prune
        self._copy_out = copy_out
        self._return_host_slots = return_host_slots
        self._num_states = 0
        self.snapshots: OrderedDict[StateSnapshot, None] = OrderedDict()
        """All snapshots, least recently used first."""
        self._num_idle = 0
        """Number of snapshots on the device whose states no sequence uses."""
        self._num_on_host = 0
        self._sources: set[RecurrentState] = set()
        """States of idle snapshots that the step being built copies. The set holds a reference to
        each state."""

    @property
    def num_used(self) -> int:
        """Number of slots with states that sequences use."""
        return (self._num_states - self._num_idle) * self.slots_per_state

    @property
    def num_cached(self) -> int:
        """Number of slots with snapshots that can be evicted, because no sequence uses them."""
        return self._num_idle * self.slots_per_state

    @property
    def num_on_device(self) -> int:
        return len(self.snapshots) - self._num_on_host

    def allocate(self) -> RecurrentState:
        """Return a new state, undefined until its sequence computes its first token.

        Requires ``slots_per_state`` available slots.
        """
        state = RecurrentState([self._take_slot() for _ in range(self.slots_per_state)])
        self._num_states += 1
        return state

    def acquire(self, state: RecurrentState) -> None:
        self._num_idle -= state.is_idle
        state.ref_count += 1

    def release(self, state: RecurrentState) -> None:
        """Drop a reference; dropping the last reference frees the slots."""
        assert state.ref_count > 0
        state.ref_count -= 1
        self._num_idle += state.is_idle
        if state.ref_count > 0:
            return
        if state.on_host:
            self._return_host_slots(state.host_slots)
            return
        self._free += state.slots
        self._num_states -= 1

    def copy(self, shared: RecurrentState, copies: Pairs) -> RecurrentState:
        """Return a new state for one of the sequences that share a state, and drop the sequence's
        reference. The next step copies the shared state into the new state.

        Args:
            shared: a state with several references.
            copies: receives pairs of (source slot, destination slot).
        """
        assert shared.ref_count > 1
        copied = self.allocate()
        copies += zip(shared.slots, copied.slots, strict=True)
        if shared.ref_count == 2 and shared.snapshot is not None and shared not in self._sources:
            self._sources.add(shared)  # the set takes over the reference
        else:
            self.release(shared)
        return copied

    def release_sources(self) -> None:
        """Allow eviction of the snapshots that the step just built copies from. Earlier, an evicted
        snapshot's slots could have become the destination of another copy of the same step."""
        while self._sources:
            self.release(self._sources.pop())

    def keep(
        self,
        state: RecurrentState,
        block: Block,
        key: bytes,
        followers: int,
        in_windows: tuple[int, ...] = (),
    ) -> StateSnapshot:
        """Keep a snapshot of a sequence's state for later rows.

        Args:
            block: the indexed block with the state's last token.
            key: the tokens of the block that the state includes.
            followers: number of rows that will start from the snapshot.
            in_windows: number of blocks, up to ``block``, that each window includes.
        """
        assert block.parent is not None
        kept = block.parent.snapshots_below or {}
        if key in kept:
            kept[key].followers += followers
            return kept[key]
        snapshot = StateSnapshot(state, block, key, followers, in_windows)
        block.parent.snapshots_below = kept | {key: snapshot}
        block.snapshots = (*block.snapshots, snapshot)
        self._count(snapshot, 1)
        self.snapshots[snapshot] = None
        self.acquire(state)
        state.snapshot = snapshot
        return snapshot

    def forgo(self, snapshot: StateSnapshot) -> None:
        """Subtract one follower from a snapshot, which may have been dropped already; drop it if no
        follower is left."""
        snapshot.followers -= 1
        if snapshot.followers <= 0 and snapshot in self.snapshots:
            self.drop(snapshot)

    def start_from(
        self, snapshot: StateSnapshot, copies: BlockCopies, more_followers: int = 0
    ) -> RecurrentState:
        """Return a state for a sequence that starts from a snapshot. Requires
        ``slots_to_start_from`` available slots.

        The last follower takes the snapshot's own state if this state is on the device.

        Args:
            copies: receives the copies that the next step must make.
            more_followers: number of rows that will start from the snapshot and that its
                ``followers`` do not include yet.
        """
        snapshot.followers += more_followers
        if self.is_last_use(snapshot):
            state = snapshot.state
            self.acquire(state)
            self.drop(snapshot)
            return state
        snapshot.followers -= 1
        self.snapshots.move_to_end(snapshot)
        if snapshot.state.on_host:
            copied = self.allocate()
            copies.ins += zip(snapshot.state.host_slots, copied.slots, strict=True)
        else:
            self.acquire(snapshot.state)
            copied = self.copy(snapshot.state, copies.within)
        if snapshot.followers <= 0:
            self.drop(snapshot)
        return copied

    def is_last_use(self, snapshot: StateSnapshot, more_followers: int = 0) -> bool:
        """Return true if a sequence that starts from a snapshot may take over its state."""
        state, followers = snapshot.state, snapshot.followers + more_followers
        return (
            not state.on_host and followers <= 1 and state.ref_count == 1 + (state in self._sources)
        )

    def slots_to_start_from(self, snapshot: StateSnapshot | None, more_followers: int = 0) -> int:
        """Return the number of available slots that a sequence needs for its state; without a
        snapshot, the slots of a new state."""
        if snapshot is None:
            return self.slots_per_state
        # Slots of an idle snapshot count as available, until a sequence takes or copies them.
        is_idle = snapshot.state.is_idle
        return self.slots_per_state * (is_idle + (not self.is_last_use(snapshot, more_followers)))

    def drop(self, snapshot: StateSnapshot) -> None:
        """Drop a snapshot, and free its state if no sequence uses it."""
        del self.snapshots[snapshot]
        block, parent = snapshot.block, snapshot.parent
        block.snapshots = tuple(other for other in block.snapshots if other is not snapshot)
        self._count(snapshot, -1)
        assert parent.snapshots_below is not None
        del parent.snapshots_below[snapshot.key]
        parent.snapshots_below = parent.snapshots_below or None
        self._num_on_host -= snapshot.state.on_host
        self._detach(snapshot.state)
        self._prune(block)

    def drop_of(self, blocks: Iterable[Block]) -> None:
        """Drop the snapshots in blocks that leave the index."""
        for snapshot in [kept for block in blocks for kept in block.snapshots]:
            if snapshot in self.snapshots:  # dropping another snapshot may have pruned the block
                self.drop(snapshot)

    def drop_all(self) -> None:
        for snapshot in list(self.snapshots):
            self.drop(snapshot)

    def evict(self) -> bool:
        """Free the device slots of one snapshot whose state no sequence uses. Return false if there
        is no such snapshot."""
        return self._move_least_wanted(self._idle())

    def give_up_snapshot(self) -> bool:
        """Move one snapshot off the device; return false if there is none. Giving up a snapshot
        frees the state, or lets a sequence that uses the state go on without a copy."""
        return self._move_least_wanted(one for one in self.snapshots if not one.state.on_host)

    def num_less_wanted(self, followers: int) -> int:
        """Return the number of evictable slots of snapshots with fewer than ``followers``
        followers."""
        return self.slots_per_state * sum(each.followers < followers for each in self._idle())

    def _idle(self) -> Iterator[StateSnapshot]:
        return (each for each in self.snapshots if each.state.is_idle)

    def _detach(self, state: RecurrentState) -> None:
        """Drop a snapshot's reference to its state."""
        self._num_idle -= state.is_idle
        state.snapshot = None
        self.release(state)

    def _count(self, snapshot: StateSnapshot, change: int) -> None:
        """Add ``change`` to the snapshot counts of the snapshot's block, the block's
        ancestors, and the slots in its windows: a row that starts from the snapshot needs them
        all."""
        node: Block | None = snapshot.block
        for before in range(max(snapshot.in_windows, default=0)):
            assert node is not None
            for slot, num_blocks in zip(node.window_slots, snapshot.in_windows, strict=True):
                slot.num_kept += change * (before < num_blocks)
            node = node.parent
        self._count_below(snapshot.block, change)
        node = snapshot.block
        for _ in range(max(snapshot.in_windows, default=0)):
            assert node is not None
            self._update_priority(node)
            node = node.parent

    def _count_below(self, block: Block, change: int) -> None:
        node: Block | None = block
        while node is not None:
            before = node.num_kept > 0
            node.num_kept += change
            if (node.num_kept > 0) == before:
                return
            self._update_priority(node)
            node = node.parent

    def _move_least_wanted(self, snapshots: Iterable[StateSnapshot]) -> bool:
        """Move the snapshot with the fewest followers (in a tie, the least recently used) to the
        host. If the host has no space, drop the snapshot."""
        snapshot = min(snapshots, key=lambda each: each.followers, default=None)
        if snapshot is None:
            return False
        host_slots = self._copy_out(snapshot.state.slots)
        if snapshot not in self.snapshots:  # the host evicted the snapshot's block
            self._return_host_slots(host_slots)
        elif host_slots:
            state, snapshot.state = snapshot.state, RecurrentState([], host_slots)
            snapshot.state.snapshot = snapshot
            self._num_on_host += 1
            self._detach(state)
        else:
            self.drop(snapshot)
        return True
