"""Checks that scheduler, table, beam groups and KV pool agree between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from itertools import zip_longest

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.eviction import EvictionOrder
from batchinfer.engine.kv.host_pool import HostPool
from batchinfer.engine.kv.prefix_index import Block, PrefixIndex, RecurrentState, WindowSlot
from batchinfer.engine.kv.window_slots import live_slots
from batchinfer.engine.scheduler.preemption import ReuseHints
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.sequence import Sequence


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that queue, table and pool agree."""
    check_table(scheduler.table)
    check_beam_groups(scheduler.table)
    running = list(scheduler.table.running())
    check_pool(
        scheduler.pool,
        (sequence.blocks for sequence in running),
        (sequence.num_evicted for sequence in running),
        [sequence.recurrent_state for sequence in running if sequence.recurrent_state],
    )
    check_states(scheduler)
    check_reuse_hints(scheduler.reuse_hints)
    assert all(waiting.row < 0 and not waiting.blocks for waiting in scheduler.waiting)


def check_table(table: SequenceTable) -> None:
    """Assert that arrays, sequences and block tables agree."""
    assert table.num_running == int(table.active.sum())
    for row, sequence in enumerate(table.sequences):
        assert (sequence is not None) == bool(table.active[row])
        if sequence is None:
            continue
        assert sequence.row == row
        in_flight = bool(table.sample_at[row] >= 0)
        assert table.num_tokens[row] == sequence.num_tokens + in_flight
        assert not in_flight or table.num_computed[row] == sequence.num_tokens
        assert table.num_blocks[row] == len(sequence.blocks)
        _check_slots(table, sequence)
        assert 0 <= table.num_computed[row] < table.num_tokens[row] <= table.max_total[row]
        assert len(sequence.blocks) == -(-int(table.num_computed[row]) // table.block_size)


def _check_slots(table: SequenceTable, sequence: Sequence) -> None:
    """Assert that a row has slots for its blocks in all layer groups, except for evicted blocks."""
    blocks, has_own = sequence.blocks, table.windows[:1] == (0,)
    num_evicted = (*[0] * has_own, *sequence.num_evicted)
    assert len(num_evicted) == len(table.windows)
    for group, gone in enumerate(num_evicted):
        slots = [_slots(block, has_own=has_own)[group] for block in blocks]
        assert all(slot >= 0 for slot in slots[gone:])
        row = (
            table.other_tables[group - 1, sequence.row]
            if group
            else table.block_table[sequence.row]
        )
        assert row[gone : len(slots)].tolist() == slots[gone:]
        assert not row[len(slots) :].any()


def _slots(block: Block, *, has_own: bool) -> list[int]:
    return [block.slot] * has_own + [max(slot.slot, 0) for slot in block.window_slots]


def check_beam_groups(table: SequenceTable) -> None:
    """Assert that all beams of a group run or only the leader, and that they have equal lengths."""
    for leader in {sequence.group[0] for sequence in table.running() if sequence.state.search}:
        group, size = leader.group, leader.request.group_size
        rows = [beam.row for beam in group if beam.row >= 0]
        assert len(rows) in (1, len(group))
        assert len(group) <= size
        assert table.is_beam[rows].all()
        assert len(set(table.admission[rows].tolist())) == 1
        assert len(set(table.num_tokens[rows].tolist())) == 1
        assert table.pending_forks[rows].sum() == size - len(rows)
        assert (table.sample_at[rows] >= 0).all() or (table.sample_at[rows] < 0).all()


def check_states(scheduler: Scheduler) -> None:
    """Assert that the table and the running sequences agree on recurrent states."""
    table, has_states = scheduler.table, scheduler.pool.states.slots_per_state > 0
    assert all(waiting.recurrent_state is None for waiting in scheduler.waiting)
    for sequence in table.running():
        state = sequence.recurrent_state
        assert (state is not None) == has_states
        if state is not None:
            assert table.state_table[sequence.row].tolist() == state.slots
            assert state.ref_count == 1 or table.state_shared[sequence.row]


def check_reuse_hints(hints: ReuseHints) -> None:
    """Assert that each indexed block counts the sequences that wait for it."""
    waiters = Counter(block for blocks in hints._waiting.values() for block in blocks)
    for block in (*waiters, *hints._pool.index.blocks()):
        assert block.waiters == waiters[block]
    assert all(sequence.row < 0 for sequence in hints._waiting)


def check_pool(
    pool: BlockPool,
    tables: Iterable[list[Block]],
    num_evicted: Iterable[tuple[int, ...]] = (),
    states: Sequences[RecurrentState] = (),
) -> None:
    """Assert that counts, slots and index agree with the block tables of all running sequences.

    Args:
        pool: a pool between two steps or calls.
        tables: the block tables of the running sequences.
        num_evicted: for each sequence, the number of leading blocks that left each window; by
            default, 0.
        states: the recurrent state of each sequence.
    """
    counts: Counter[Block] = Counter()
    readers: Counter[WindowSlot] = Counter()
    for table, gone in zip_longest(tables, num_evicted, fillvalue=()):
        counts.update(table)
        readers.update(slot for at, b in enumerate(table) for slot in live_slots(b, at, gone))
    assert all(block.ref_count == count for block, count in counts.items())
    assert all(slot.readers == count for slot, count in readers.items())
    held: list[Block | WindowSlot] = [*(b for b in counts if pool.has_own), *readers]
    of_states = _check_states(pool, states)
    slots = [*pool.free, *(b.slot for b in pool.cached), *(b.slot for b in held), *of_states]
    assert sorted(slots) == list(range(pool.num_blocks)), "a slot is lost or held twice"
    assert pool.num_used == len(held) + pool.states.num_used
    own = sum(count > 1 for count in counts.values()) if pool.has_own else 0
    assert pool.num_shared == own + sum(count > 1 for count in readers.values())
    indexed = list(pool.index.blocks())
    for block in indexed:
        _check_entry(pool, block, counts)
    for place in pool.cached:
        assert (place.block if isinstance(place, WindowSlot) else place).indexed
    assert all(block.indexed or block.host_slot < 0 for block in counts)
    _check_order(pool.cached)
    _check_host(pool.host, indexed, [kept.state for kept in pool.states.snapshots])
    _check_index(pool.index, pool.pending.filled)


def _check_states(pool: BlockPool, states: Sequences[RecurrentState]) -> list[int]:
    """Assert that states count the sequences and snapshots that use them; return their slots.

    Args:
        states: the states of the running sequences.
    """
    references = Counter(states)
    kept = list(pool.states.snapshots)
    references.update(snapshot.state for snapshot in kept)
    assert all(state.ref_count == count for state, count in references.items())
    for snapshot in kept:
        assert snapshot.state.snapshot is snapshot
        assert snapshot.block.indexed
        assert snapshot in snapshot.block.snapshots
        assert 0 < snapshot.num_tokens <= pool.block_size
        assert snapshot.block.key.startswith(snapshot.key)
        assert snapshot.parent is snapshot.block.parent
        assert snapshot.parent.snapshots_below[snapshot.key] is snapshot
    assert sum(len(block.snapshots) for block in pool.index.blocks()) == len(kept)
    for block in pool.index.blocks():
        below = () if block.children is None else block.children.blocks.values()
        assert block.num_kept == len(block.snapshots) + sum(one.num_kept > 0 for one in below)
    in_windows: Counter[WindowSlot] = Counter()
    for snapshot in kept:
        assert len(snapshot.in_windows) == len(snapshot.block.window_slots)
        node = snapshot.block
        for before in range(max(snapshot.in_windows, default=0)):
            in_windows.update(
                slot
                for slot, count in zip(node.window_slots, snapshot.in_windows, strict=True)
                if before < count
            )
            node = node.parent
    for block in pool.index.blocks():
        assert all(slot.num_kept == in_windows[slot] for slot in block.window_slots)
    assert pool.states.num_used == len(set(states)) * pool.states.slots_per_state
    assert not any(state.on_host for state in states), "a sequence uses a state on the host"
    on_host = [state for state in references if state.on_host]
    assert pool.states.num_on_device == len(kept) - len(on_host)
    for state in references:
        assert len(state.slots or state.host_slots) == pool.states.slots_per_state
        assert not (state.slots and state.host_slots)
    assert pool.states.num_used + pool.states.num_cached == (
        (len(references) - len(on_host)) * pool.states.slots_per_state
    )
    return [slot for state in references for slot in state.slots]


def _check_entry(pool: BlockPool, block: Block, counts: Counter[Block]) -> None:
    """Assert that an indexed block is in the right eviction queues."""
    assert (block.ref_count > 0) == (block in counts)
    assert (block in pool.cached) == (block.ref_count == 0 and block.slot >= 0)
    for slot in block.window_slots:
        assert (slot in pool.cached) == (slot.readers == 0 and slot.slot >= 0)
    holds = max(block.slot, block.host_slot, *(slot.slot for slot in block.window_slots)) >= 0
    holds |= not pool.windows and block.num_kept > 0
    assert holds or block.ref_count or block.children, (
        "an index entry has no slots, references or children"
    )


def _check_order(order: EvictionOrder[Block] | EvictionOrder[Block | WindowSlot]) -> None:
    """Assert that wanted and idle blocks are in separate eviction queues."""
    assert not any(block.wanted for block in order._idle)
    assert all(block.wanted for block in order._wanted)


def _check_host(host: HostPool, indexed: list[Block], kept: list[RecurrentState]) -> None:
    """Assert that host slots and eviction orders agree with the index and the snapshots.

    Args:
        indexed: all blocks in the index.
        kept: the states of all snapshots.
    """
    held = [block for block in indexed if block.host_slot >= 0]
    of_blocks = (block.host_slot for block in held)
    of_states = (slot for state in kept for slot in state.host_slots)
    slots = sorted([*host._returned, *host._read_last, *of_blocks, *of_states])
    assert slots == list(range(host._next)), "a host slot is lost or held twice"
    assert host._next <= host.num_slots
    assert set(host._alone) == {block for block in held if block.slot < 0}
    assert set(host._copies) <= {block for block in held if block.slot >= 0}
    _check_order(host._alone)


def _check_index(index: PrefixIndex, in_flight: set[Block]) -> None:
    """Assert that every node's lists are right; blocks ``in_flight`` are not yet computed."""
    for node in (*index._roots.values(), *index.blocks()):
        children = node.children
        if children is None:
            continue
        assert children.blocks, "a node without children was not removed"
        by_state: tuple[list[bytes], list[bytes]] = ([], [])
        for key, block in children.blocks.items():
            assert block.key == key
            assert block.parent is node
            by_state[block in in_flight].append(key)
        assert (children.settled, children.in_flight) == tuple(map(sorted, by_state))
