"""Prefix hits: cached prefixes that sequences start from."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_index import Block, PrefixMatch, StateSnapshot


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """An indexed prefix of a sequence: whole blocks to share, and a part of one block to copy."""

    blocks: list[Block]
    tail: Block | None
    """Block whose leading part is copied; None: no block."""
    num_tokens: int
    owns_tail: bool = False
    """True if no other sequence needs the tail. The tail then leaves the index and is reused."""
    num_evicted: tuple[int, ...] = ()
    """For each window, the number of leading blocks outside the window."""
    snapshot: StateSnapshot | None = None
    """Recurrent state after the hit's tokens; None if the hit is empty or no layer is recurrent."""

    @property
    def num_shared(self) -> int:
        """Number of leading blocks that running sequences use already."""
        return sum(block.ref_count > 0 for block in self.blocks)

    @property
    def num_idle(self) -> int:
        """Number of cached slots that become used when the hit is acquired."""
        idle = sum(
            block.ref_count == 0 <= max(block.slot, block.host_slot) for block in self.blocks
        )
        idle += sum(
            block.window_slots[at].readers == 0
            for at, evicted in enumerate(self.num_evicted)
            for block in self.blocks[evicted:]
        )
        if self.tail is None or self.owns_tail:
            return idle
        idle += self.tail.ref_count == 0 and self.tail.slot >= 0
        return idle + sum(window_slot.readers == 0 for window_slot in self.tail.window_slots)


def find_prefix_hit(
    pool: BlockPool, match: PrefixMatch, *, with_tail: bool = True, fork_at: int | None = None
) -> PrefixHit:
    """Return the longest hit within a match.

    In every layer group with a window, all blocks in the last window of the hit must still have
    their slots.

    Args:
        with_tail: true if the hit may copy part of a block.
        fork_at: number of tokens after which other sequences fork from the hit; the window before
            that point must be complete too. None: no sequence forks.
    """
    blocks, size = match.blocks, pool.block_size
    if pool.states.slots_per_state:
        return _hit_at_snapshot(pool, match, fork_at)
    tail = match.tail if with_tail and match.tail_tokens else None
    end = len(blocks) * size
    if not pool.window_slots.windows:
        return PrefixHit(blocks, tail, end + (match.tail_tokens if tail else 0))

    runs = [_runs(blocks, group) for group in range(len(pool.window_slots.windows))]
    if tail is not None and all(window_slot.slot >= 0 for window_slot in tail.window_slots):
        evicted = _num_evicted(pool, end + match.tail_tokens, fork_at)
        if all(len(blocks) - first <= run[-1] for first, run in zip(evicted, runs, strict=True)):
            return PrefixHit(blocks, tail, end + match.tail_tokens, num_evicted=evicted)
    for count in range(len(blocks), -1, -1):
        evicted = _num_evicted(pool, count * size, fork_at)
        if all(count - first <= run[count] for first, run in zip(evicted, runs, strict=True)):
            break
    return PrefixHit(blocks[:count], None, count * size, num_evicted=evicted)


def no_hit(pool: BlockPool) -> PrefixHit:
    return PrefixHit([], None, 0, num_evicted=pool.window_slots.num_evicted(0))


def _num_evicted(pool: BlockPool, num_tokens: int, fork_at: int | None) -> tuple[int, ...]:
    return pool.window_slots.num_evicted(
        num_tokens if fork_at is None else min(num_tokens, fork_at)
    )


def _hit_at_snapshot(pool: BlockPool, match: PrefixMatch, fork_at: int | None) -> PrefixHit:
    """Return the longest hit that ends at a snapshot and has all slots that the windows need."""
    for snapshot, before in reversed(match.snapshots):
        is_whole = snapshot.num_tokens == pool.block_size
        blocks = match.blocks[: before + is_whole]
        tail = None if is_whole else snapshot.block
        num_tokens = before * pool.block_size + snapshot.num_tokens
        evicted = _num_evicted(pool, num_tokens, fork_at)
        needed = [
            block.window_slots[group]
            for group, first in enumerate(evicted)
            for block in blocks[first:]
        ]
        needed += () if tail is None else tail.window_slots
        if all(window_slot.slot >= 0 for window_slot in needed):
            return PrefixHit(blocks, tail, num_tokens, num_evicted=evicted, snapshot=snapshot)
    return no_hit(pool)


def _runs(blocks: list[Block], group: int) -> list[int]:
    """Return [len(blocks) + 1]: element i is the number of consecutive blocks just before index i
    that have a slot in ``group``."""
    runs = [0]
    for block in blocks:
        runs.append(runs[-1] + 1 if block.window_slots[group].slot >= 0 else 0)
    return runs


@dataclass(frozen=True, slots=True)
class AcquiredPrefix:
    """The blocks that a sequence refers to after it has acquired a prefix hit."""

    blocks: list[Block]
    sources: list[Block]
    """Copied blocks. The caller releases them when all blocks of the step are allocated."""
    num_swapped: int
    """Number of blocks copied from the host."""


def acquire_prefix(pool: BlockPool, hit: PrefixHit) -> AcquiredPrefix:
    """Reference a hit's blocks, swap in blocks from the host, and copy the tail."""
    tail = [] if hit.tail is None else [hit.tail]
    for at, block in enumerate((*hit.blocks, *tail)):
        pool.acquire(block, at, hit.num_evicted)
    if hit.owns_tail:
        pool.evict_subtree(tail[0])
        return AcquiredPrefix([*hit.blocks, *tail], [], _swap_in(pool, hit.blocks))
    # Allocate only after all blocks are referenced, because an allocation may evict other blocks.
    swapped = _swap_in(pool, hit.blocks)
    copies = [pool.allocate() for _ in tail]
    for source, copy in zip(tail, copies, strict=True):
        pool.copy(source, copy)
        swapped += source.slot < 0 <= source.host_slot
    return AcquiredPrefix([*hit.blocks, *copies], tail, swapped)


def _swap_in(pool: BlockPool, blocks: list[Block]) -> int:
    absent = [block for block in blocks if block.slot < 0 <= block.host_slot]
    for block in absent:
        pool.swap_in(block)
    return len(absent)
