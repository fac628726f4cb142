"""What is always true of the KV pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING

from batchinfer.engine.kv.prefix_index import Block, WindowSlot
from batchinfer.engine.kv.window_slots import live_slots

if TYPE_CHECKING:
    from batchinfer.engine.kv.block_pool import BlockPool


def check_pool(
    pool: BlockPool, tables: Iterable[list[Block]], num_evicted: Iterable[tuple[int, ...]]
) -> None:
    """Assert that counts, slots and index agree with ``tables``; see ``BlockPool``."""
    counts: Counter[Block] = Counter()
    readers: Counter[WindowSlot] = Counter()
    for table, gone in zip_longest(tables, num_evicted, fillvalue=()):
        counts.update(table)
        readers.update(part for at, b in enumerate(table) for part in live_slots(b, at, gone))
    assert all(block.ref_count == count for block, count in counts.items())
    assert all(part.readers == count for part, count in readers.items())
    held: list[Block | WindowSlot] = [*(b for b in counts if pool.has_own), *readers]
    slots = [*pool.free, *(b.slot for b in pool.cached), *(b.slot for b in held)]
    assert sorted(slots) == list(range(pool.num_blocks)), "a slot is lost or held twice"
    assert pool.num_used == len(held)
    own = sum(count > 1 for count in counts.values()) if pool.has_own else 0
    assert pool.num_shared == own + sum(count > 1 for count in readers.values())
    indexed = list(pool.index.blocks())
    for block in indexed:
        _check_entry(pool, block, counts)
    for place in pool.cached:
        assert (place.block if isinstance(place, WindowSlot) else place).indexed
    assert all(block.indexed or block.host_slot < 0 for block in counts)
    pool.cached.check_invariants()
    pool.host.check_invariants(indexed)
    pool.index.check_invariants(pool.pending.filled)


def _check_entry(pool: BlockPool, block: Block, counts: Counter[Block]) -> None:
    """Assert that an indexed block is filed where it should be."""
    assert (block.ref_count > 0) == (block in counts)
    assert (block in pool.cached) == (block.ref_count == 0 and block.slot >= 0)
    for part in block.window_slots:
        assert (part in pool.cached) == (part.readers == 0 and part.slot >= 0)
    holds = max(block.slot, block.host_slot, *(part.slot for part in block.window_slots)) >= 0
    assert holds or block.ref_count or block.children, "an entry leads to nothing"
