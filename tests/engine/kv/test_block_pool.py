"""Block accounting under random operations, and exact prefix lookup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_hit import PrefixHit, acquire_prefix
from batchinfer.engine.kv.prefix_index import Block, common_tokens, token_key
from batchinfer.engine.scheduler.preemption import ReuseHints
from batchinfer.engine.sequence import RequestState, Sequence
from tests.engine.fake import make_request
from tests.engine.invariants import check_pool, check_reuse_hints

SIZE = 4


class PoolMachine(RuleBasedStateMachine):
    """Runs random operations on block tables: they grow, share, fork, wait, return and end.

    Every block stays accounted for, and every block keeps the contents written to it, on the device
    and on the host.
    """

    @initialize(
        num_blocks=st.integers(1, 16), num_host_blocks=st.integers(0, 12), caching=st.booleans()
    )
    def start(self, num_blocks: int, num_host_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(
            num_blocks, SIZE, enable_prefix_caching=caching, num_host_blocks=num_host_blocks
        )
        self.reuse_hints = ReuseHints(self.pool)
        self.tables: list[list[Block]] = []
        self.waiting: list[Sequence] = []
        self.arrivals = self.steps = 0
        self.device: dict[int, object] = {}
        self.host: dict[int, object] = {}
        self.holds: dict[Block, object] = {}

    def allocate(self) -> Block:
        """Allocate a block and choose unique contents for the step to write to it."""
        block = self.pool.allocate()
        self.holds[block] = object()
        return block

    def step(self, writes: Iterable[Block] = ()) -> None:
        """Copy and write like a worker."""
        copies = self.pool.take_copies()
        for slot, host_slot in copies.outs:
            self.host[host_slot] = self.device[slot]
        for host_slot, slot in copies.ins:
            self.device[slot] = self.host[host_slot]
        for block in writes:
            self.device[block.slot] = self.holds[block]
        self.pool.commit_fills()
        self.steps += 1
        if self.steps > 2:
            self.pool.confirm()

    def sequence(self, reused_prefix_len: int) -> Sequence:
        request = replace(
            make_request(0, [1] * 64, max_tokens=1), reused_prefix_len=reused_prefix_len
        )
        self.arrivals += 1
        return Sequence(RequestState(request, 0.0, self.arrivals), 0)

    @rule(count=st.integers(0, 16))
    def grant(self, count: int) -> None:
        """Allocate ``count`` blocks; if as many are available, this must succeed."""
        if count <= self.pool.num_available:
            table = [self.allocate() for _ in range(count)]
            self.step(table)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block in table:
            self.pool.acquire(block)
        self.tables.append(list(table))

    @precondition(lambda self: any(self.tables) and self.pool.num_available)
    @rule(data=st.data())
    def write_to_last_block(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        if table[-1].ref_count > 1:
            shared, table[-1] = table[-1], self.allocate()
            self.pool.release([shared])
            self.step(table[-1:])
        assert table[-1].ref_count == 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def index(self, data: st.DataObject, tokens: list[int]) -> None:
        """Index a table's blocks as if they held ``tokens``; with few distinct tokens, clashes are
        likely."""
        self.enter(data.draw(st.sampled_from(self.tables)), tokens)

    def enter(self, table: list[Block], tokens: list[int]) -> list[Block]:
        parent, entries = self.pool.entry_below([]), []
        for at, block in enumerate(table[: -(-len(tokens) // SIZE)]):
            if parent is not None and not block.indexed:
                key = token_key(tokens[at * SIZE : (at + 1) * SIZE])
                parent = (
                    self.pool.insert_block(parent, block, key) if len(key) == 4 * SIZE else None
                )
                entries += [] if parent is None else [parent]
        self.step()
        return entries

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12), fails=st.booleans())
    def come_back(self, tokens: list[int], fails: bool) -> None:
        """Start a table with the longest indexed prefix, on the device or on the host."""
        blocks = self.pool.match(token_key(tokens)).blocks
        hit = PrefixHit(blocks, None, len(blocks) * SIZE)
        if hit.num_idle > self.pool.num_available:
            return
        absent = sum(block.slot < 0 for block in blocks)
        taken = acquire_prefix(self.pool, hit)
        assert taken.num_swapped == absent
        assert len(self.pool.block_copies.ins) == absent
        self.tables.append(taken.blocks)
        if fails:
            self.abort_all()
        else:
            self.step()

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=4, max_size=12))
    def preempt(self, data: st.DataObject, tokens: list[int]) -> None:
        """Index a table's blocks, and let its sequence wait for them."""
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        entries = self.enter(table, tokens)
        waiting = self.sequence(0)
        self.reuse_hints.add(waiting, entries)
        self.waiting.append(waiting)
        self.pool.release(table)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.waiting) - 1))
        self.reuse_hints.remove(self.waiting.pop(at))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), reused_prefix_len=st.integers(0, 12))
    def finish(self, data: st.DataObject, reused_prefix_len: int) -> None:
        sequence = self.sequence(reused_prefix_len)
        sequence.blocks = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.reuse_hints.note_use(sequence)
        self.pool.release(sequence.blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        if block.indexed:
            self.pool.evict_subtree(block)

    @rule()
    def abort_all(self) -> None:
        self.pool.rollback()
        self.steps = 0
        for table in self.tables:
            self.pool.release(table)
        self.tables.clear()
        self.waiting.clear()
        self.reuse_hints.remove_all()

    @invariant()
    def accounted_for(self) -> None:
        if hasattr(self, "pool"):
            check_pool(self.pool, self.tables)
            check_reuse_hints(self.reuse_hints)

    @invariant()
    def nothing_is_mistaken(self) -> None:
        """A block holds the contents written to it, on the device and on the host."""
        if hasattr(self, "pool"):
            for block in {*self.pool.index.blocks(), *(b for t in self.tables for b in t)}:
                if block.slot >= 0:
                    assert self.device[block.slot] is self.holds[block]
                if block.host_slot >= 0:
                    assert self.host[block.host_slot] is self.holds[block]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.abort_all()
            check_pool(self.pool, [])
            assert self.pool.num_used == 0


TestPoolMachine = PoolMachine.TestCase


def indexed(pool: BlockPool, tokens: list[int]) -> list[Block]:
    """Return blocks that hold ``tokens``, indexed and released."""
    table = [pool.allocate() for _ in range(-(-len(tokens) // SIZE))]
    parent = pool.entry_below([])
    for at, block in enumerate(table):
        assert parent is not None
        parent = pool.insert_block(parent, block, token_key(tokens[at * SIZE : (at + 1) * SIZE]))
    pool.commit_fills()
    pool.release(table)
    return table


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, SIZE, enable_prefix_caching=True)


def test_a_prefix_is_found_in_whole_blocks_and_part_of_one_more(pool: BlockPool) -> None:
    table = indexed(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    match = pool.match(token_key([1, 2, 3, 4, 5, 6, 9, 9]))
    assert match.blocks == table[:1]
    assert (match.tail, match.tail_tokens) == (table[1], 2)


def test_the_longest_match_among_children_is_taken(pool: BlockPool) -> None:
    for tail in ([5, 1, 1, 1], [5, 6, 1, 1], [5, 6, 7, 1], [5, 7, 7, 7]):
        indexed(pool, [1, 2, 3, 4, *tail])
    match = pool.match(token_key([1, 2, 3, 4, 5, 6, 7, 8]))
    assert match.tail.key == token_key([5, 6, 7, 1])
    assert match.tail_tokens == 3


def test_equal_tokens_after_unequal_prefixes_are_not_confused(pool: BlockPool) -> None:
    indexed(pool, [1, 1, 1, 1, 5, 6, 7, 8])
    assert pool.match(token_key([2, 2, 2, 2, 5, 6, 7, 8])).blocks == []


def test_least_recently_used_blocks_go_first_and_leaves_before_prefixes(pool: BlockPool) -> None:
    old = indexed(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    new = indexed(pool, [3, 3, 3, 3])
    taken = [pool.allocate() for _ in range(len(pool.free) + 1)]
    assert not old[1].indexed
    assert old[0].indexed
    taken.append(pool.allocate())
    assert not old[0].indexed
    assert new[0].indexed
    check_pool(pool, [taken])


def test_evicting_a_prefix_removes_its_continuations_from_the_index(pool: BlockPool) -> None:
    table = indexed(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    pool.evict_subtree(table[0])
    assert pool.num_cached == 0
    assert len(pool.free) == 8


def test_a_partly_filled_block_is_found_again_under_all_its_tokens(pool: BlockPool) -> None:
    block, root = pool.allocate(), pool.entry_below([])
    assert root is not None
    pool.insert_block(root, block, token_key([1, 2]))
    pool.commit_fills()
    pool.insert_block(root, block, token_key([1, 2, 3, 4]))
    assert pool.match(token_key([1, 2, 3, 4, 5])).blocks == [block]
    check_pool(pool, [[block]])


def test_blocks_of_a_failed_step_are_not_found(pool: BlockPool) -> None:
    block, root = pool.allocate(), pool.entry_below([])
    assert root is not None
    pool.insert_block(root, block, token_key([1, 2, 3, 4]))
    pool.rollback()
    assert pool.match(token_key([1, 2, 3, 4])).blocks == []


@pytest.mark.parametrize("ran", [0, 1, 2])
def test_blocks_of_a_submitted_step_are_found_until_a_step_fails(pool: BlockPool, ran: int) -> None:
    table = [pool.allocate(), pool.allocate()]
    keys = [token_key([at] * SIZE) for at in range(2)]
    root = pool.entry_below([])
    assert root is not None
    for block, key in zip(table, keys, strict=True):
        pool.insert_block(root, block, key)
        pool.commit_fills()
    assert [pool.match(key).blocks for key in keys] == [[block] for block in table]
    for _ in range(ran):
        pool.confirm()
    pool.rollback()
    assert [bool(pool.match(key).blocks) for key in keys] == [ran > 0, ran > 1]


def test_a_block_entered_after_its_step_was_submitted_fails_with_it(pool: BlockPool) -> None:
    block, root = pool.allocate(), pool.entry_below([])
    assert root is not None
    pool.commit_fills()
    pool.insert_block(root, block, token_key([1] * SIZE))
    pool.mark_filled(block)
    pool.rollback()
    assert not block.indexed


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(2, SIZE, enable_prefix_caching=False)
    assert pool.entry_below([]) is None
    pool.release([pool.allocate()])
    assert (len(pool.free), pool.num_cached) == (2, 0)


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [([], [1], 0), ([1, 2, 3], [1, 2, 3, 4], 3), ([1, 2, 3], [1, 9, 3], 1), ([256], [1], 0)],
)
def test_common_tokens(left: list[int], right: list[int], count: int) -> None:
    assert common_tokens(token_key(left), token_key(right)) == count


def small_pool(num_blocks: int, num_host_blocks: int) -> tuple[BlockPool, ReuseHints]:
    pool = BlockPool(num_blocks, SIZE, enable_prefix_caching=True, num_host_blocks=num_host_blocks)
    return pool, ReuseHints(pool)


def waiting_for(reuse_hints: ReuseHints, blocks: list[Block]) -> Sequence:
    sequence = Sequence(RequestState(make_request(0, [1] * 8, max_tokens=1), 0.0, 0), 0)
    reuse_hints.add(sequence, blocks)
    return sequence


def evict_all(pool: BlockPool) -> None:
    """Allocate all blocks once, so that the pool evicts their contents."""
    pool.release([pool.allocate() for _ in range(pool.num_available)])


def test_a_step_does_not_fill_a_host_slot_that_it_reads() -> None:
    """A step first copies to the host and then reads from it, so it would read the new contents."""
    pool, reuse_hints = small_pool(2, 2)
    first = indexed(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    waiting_for(reuse_hints, first)
    evict_all(pool)
    assert len(pool.take_copies().outs) == 2
    pool.commit_fills()
    waiting_for(reuse_hints, indexed(pool, [3, 3, 3, 3, 4, 4, 4, 4]))
    acquire_prefix(pool, PrefixHit(first, None, 8))
    copies = pool.take_copies()
    assert (copies.outs, len(copies.ins)) == ([], 2)
    check_pool(pool, [first])


def test_a_step_does_not_fill_a_host_slot_that_it_reads_after_its_block_left_the_index() -> None:
    """A failed row's blocks leave the index; a row that has acquired them gets their contents."""
    pool, reuse_hints = small_pool(4, 2)
    first = indexed(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    waiting_for(reuse_hints, first)
    evict_all(pool)
    pool.take_copies()
    pool.commit_fills()
    waiting_for(reuse_hints, indexed(pool, [3, 3, 3, 3, 4, 4, 4, 4]))
    acquire_prefix(pool, PrefixHit(first, None, 8))
    pool.evict_subtree(first[0])
    evict_all(pool)
    copies = pool.take_copies()
    assert {slot for slot, _ in copies.ins}.isdisjoint(slot for _, slot in copies.outs)
    check_pool(pool, [first])
    pool.commit_fills()
    assert pool.host.num_used == 0
    check_pool(pool, [first])


def test_spare_copies_are_dropped_before_blocks_are_lost() -> None:
    pool, reuse_hints = small_pool(4, 2)
    first = indexed(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    waiting_for(reuse_hints, first)
    evict_all(pool)
    pool.commit_fills()
    acquire_prefix(pool, PrefixHit(first, None, 8))
    pool.commit_fills()
    second = indexed(pool, [3, 3, 3, 3, 4, 4, 4, 4])
    waiting_for(reuse_hints, second)
    evict_all(pool)
    assert [block.host_slot >= 0 for block in first + second] == [False, False, True, True]
    assert all(block.indexed for block in first + second)
    check_pool(pool, [first])


def test_making_room_on_the_host_may_drop_the_block_to_be_copied() -> None:
    """The prefix is dropped first: it was wanted earlier than the block that continues it."""
    pool, reuse_hints = small_pool(2, 1)
    prefix, rest = indexed(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    waiting_for(reuse_hints, [prefix])
    reuse_hints.remove(waiting_for(reuse_hints, [rest]))
    waiting_for(reuse_hints, [rest])
    evict_all(pool)
    assert not prefix.indexed
    assert not rest.indexed
    assert pool.host.num_used == 0
    check_pool(pool, [])


def test_a_full_host_drops_unwanted_blocks_then_the_least_recently_used() -> None:
    pool, reuse_hints = small_pool(1, 2)
    tables = []
    for token in range(4):
        tables += indexed(pool, [token] * SIZE)
        waiting = waiting_for(reuse_hints, tables[-1:])
        evict_all(pool)
        if token == 1:
            reuse_hints.remove(waiting)
    assert [block.indexed for block in tables] == [False, False, True, True]
    assert [block.slot for block in tables[2:]] == [-1, -1]


def test_the_last_row_to_arrive_decides_whether_a_block_is_used_later() -> None:
    """The order in which the rows finish does not matter."""
    pool, reuse_hints = small_pool(4, 0)
    table = [pool.allocate(), pool.allocate()]
    verdicts = []
    for arrival, reused_prefix_len in ((1, 8), (3, 7), (2, 8)):
        request = replace(
            make_request(0, [1] * 8, max_tokens=1), reused_prefix_len=reused_prefix_len
        )
        sequence = Sequence(RequestState(request, 0.0, arrival), 0)
        sequence.blocks = table
        reuse_hints.note_use(sequence)
        verdicts.append([block.used_later for block in table])
    assert verdicts == [[True, True], [True, False], [True, False]]


@pytest.mark.parametrize("submitted", [False, True])
def test_blocks_that_a_failed_step_moved_are_not_found(submitted: bool) -> None:
    """The failed step copied one block to the host, and another block back to the device."""
    pool, reuse_hints = small_pool(2, 4)
    there = indexed(pool, [1] * SIZE)
    waiting_for(reuse_hints, there)
    evict_all(pool)
    pool.take_copies()
    pool.commit_fills()
    for _ in range(2):
        pool.confirm()
    leaves = indexed(pool, [2] * SIZE)
    waiting_for(reuse_hints, leaves)
    pool.confirm()
    taken = acquire_prefix(pool, PrefixHit(there, None, SIZE))
    taken.blocks.append(pool.allocate())
    assert leaves[0].slot < 0
    if submitted:
        pool.commit_fills()
    pool.rollback()
    assert not there[0].indexed
    assert not leaves[0].indexed
    check_pool(pool, [taken.blocks])
    assert pool.host.num_used == 0


def test_output_tokens_have_other_keys_than_prompt_tokens() -> None:
    """Tokens of an output may see less than the same tokens in a prompt (Unlimited-OCR)."""
    answered = Sequence(RequestState(make_request(0, [1, 2, 3], max_tokens=9), 0.0, 0), 0)
    answered.output_ids = [4, 5, 6]
    asked = Sequence(RequestState(make_request(1, [1, 2, 3, 4, 5, 6], max_tokens=9), 0.0, 1), 0)
    assert answered.tokens(0, 6).tolist() == asked.tokens(0, 6).tolist()
    assert common_tokens(answered.key(0, 6), asked.key(0, 6)) == 3
    assert answered.key(4, 6) == answered.key(0, 6)[-8:] != asked.key(4, 6)
