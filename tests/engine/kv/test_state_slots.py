"""Slots of recurrent states and snapshots while a step is being built."""

from __future__ import annotations

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_index import Block, StateSnapshot, token_key
from tests.engine.invariants import check_pool

SIZE, PER_STATE = 4, 3


def pool_with_snapshot(num_slots: int, followers: int) -> tuple[BlockPool, StateSnapshot]:
    """Return a pool with two indexed blocks, and an unused snapshot at the end of the second."""
    pool = BlockPool(num_slots, SIZE, enable_prefix_caching=True, slots_per_state=PER_STATE)
    parent = pool.entry_below([])
    blocks = list[Block]()
    for key in (token_key([1, 2, 3, 4]), token_key([5, 6, 7, 8])):
        assert parent is not None
        blocks.append(pool.allocate())
        parent = pool.insert_block(parent, blocks[-1], key)
    pool.commit_fills()
    pool.confirm()
    state = pool.states.allocate()
    pool.states.keep(state, blocks[-1], blocks[-1].key, followers)
    pool.states.release(state)
    pool.release(blocks)
    check_pool(pool, [])
    (snapshot,) = pool.states.snapshots
    return pool, snapshot


def test_snapshot_that_a_step_copies_is_not_evicted_while_the_step_is_built() -> None:
    pool, snapshot = pool_with_snapshot(2 + 2 * PER_STATE, followers=2)
    own = pool.states.start_from(snapshot, pool.block_copies)
    assert pool.num_available == 2, "the blocks are available, but not the source of the copy"
    copies = pool.take_copies().within
    assert copies == list(zip(snapshot.state.slots, own.slots, strict=True))
    assert pool.num_available == 2 + PER_STATE
    check_pool(pool, [], states=[own])


def test_last_follower_takes_a_snapshot_that_the_same_step_copies() -> None:
    pool, snapshot = pool_with_snapshot(2 + 2 * PER_STATE, followers=2)
    assert pool.states.slots_to_start_from(snapshot) == 2 * PER_STATE
    first = pool.states.start_from(snapshot, pool.block_copies)
    assert pool.states.slots_to_start_from(snapshot) == 0
    second = pool.states.start_from(snapshot, pool.block_copies)
    assert second is snapshot.state
    assert not pool.states.snapshots
    pool.take_copies()
    check_pool(pool, [], states=[first, second])


def test_last_follower_that_copies_drops_the_snapshot() -> None:
    pool, snapshot = pool_with_snapshot(2 + 2 * PER_STATE, followers=1)
    pool.states.acquire(snapshot.state)  # like a sequence that has not computed its next token yet
    own = pool.states.start_from(snapshot, pool.block_copies)
    assert own is not snapshot.state
    assert not pool.states.snapshots
    pool.take_copies()
    check_pool(pool, [], states=[own, snapshot.state])


def test_prefix_of_a_snapshot_is_evicted_after_other_blocks() -> None:
    pool, snapshot = pool_with_snapshot(3 + PER_STATE, followers=1)
    other = pool.allocate()
    root = pool.entry_below([])
    assert root is not None
    pool.insert_block(root, other, token_key([9] * SIZE))
    pool.commit_fills()
    pool.confirm()
    pool.release([other])
    taken = pool.allocate()
    assert not other.indexed
    assert list(pool.states.snapshots) == [snapshot]
    check_pool(pool, [[taken]])
    pool.states.drop(snapshot)
    assert not any(block.wanted for block in pool.index.blocks())


def test_two_snapshots_in_a_block_are_dropped_with_it() -> None:
    pool = BlockPool(3, 4, enable_prefix_caching=True, windows=(4,), slots_per_state=1)
    block = pool.allocate()
    pool.insert_block(pool.index.root(0), block, token_key([1, 2, 3]))
    pool.commit_fills()
    pool.confirm()
    for tokens in ([1, 2], [1, 2, 3]):  # rows still use both states
        pool.states.keep(pool.states.allocate(), block, token_key(tokens), 1, (1,))
    pool.release([block], pool.window_slots.num_evicted(3))
    pool.allocate()
    assert not pool.states.snapshots


def test_host_slots_that_a_step_reads_are_not_overwritten_by_the_same_step() -> None:
    pool = BlockPool(
        12, SIZE, enable_prefix_caching=True, num_host_blocks=3, slots_per_state=PER_STATE
    )
    first, _ = keep_idle(pool, 1, followers=1), keep_idle(pool, 2, followers=2)
    next_step(pool)
    assert pool.states.give_up_snapshot()
    assert first.state.on_host
    next_step(pool)
    own = pool.states.start_from(first, pool.block_copies)  # the last follower
    pool.states.give_up_snapshot()
    copies = pool.take_copies()
    assert [slot for _, slot in copies.ins] == own.slots
    assert not {slot for slot, _ in copies.ins} & {slot for _, slot in copies.outs}


def test_no_wanted_block_leaves_the_host_for_a_state_that_does_not_fit() -> None:
    pool = BlockPool(
        9, SIZE, enable_prefix_caching=True, num_host_blocks=2, slots_per_state=PER_STATE
    )
    wanted = keep_idle(pool, 1, followers=9).block
    pool._evict(wanted)
    assert wanted.host_slot >= 0
    keep_idle(pool, 2, followers=1)
    next_step(pool)
    assert pool.states.give_up_snapshot()
    assert wanted.host_slot >= 0
    check_pool(pool, [])


def test_a_snapshot_that_its_sequence_forgoes_is_dropped() -> None:
    pool, snapshot = pool_with_snapshot(2 + 2 * PER_STATE, followers=2)
    pool.states.forgo(snapshot)
    assert list(pool.states.snapshots) == [snapshot]
    pool.states.forgo(snapshot)
    assert not pool.states.snapshots
    check_pool(pool, [])


def keep_idle(pool: BlockPool, token: int, followers: int) -> StateSnapshot:
    """Index a block of equal tokens; keep the state after it, which no sequence uses."""
    block, key, root = pool.allocate(), token_key([token] * SIZE), pool.entry_below([])
    assert root is not None
    pool.insert_block(root, block, key)
    pool.mark_filled(block)
    state = pool.states.allocate()
    snapshot = pool.states.keep(state, block, key, followers)
    pool.states.release(state)
    pool.release([block])
    return snapshot


def next_step(pool: BlockPool) -> None:
    """Submit the step being built."""
    pool.take_copies()
    pool.commit_fills()
    pool.confirm()
