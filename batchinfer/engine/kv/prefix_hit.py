"""Prefix hits: computed prefixes with which sequences start."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_index import Block, PrefixMatch, StateSnapshot


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """An indexed prefix of a sequence: whole blocks to share, and part of one more to copy."""

    blocks: list[Block]
    tail: Block | None
    num_tokens: int
    owns_tail: bool = False
    """Whether no other sequence needs the tail, so that it is reused in place, off the index."""
    num_evicted: tuple[int, ...] = ()
    """Leading blocks outside each window."""
    snapshot: StateSnapshot | None = None
    """Recurrent state after these tokens; None: the model has none, or there are no tokens."""

    @property
    def num_shared(self) -> int:
        """Leading blocks that running sequences hold already."""
        return sum(block.ref_count > 0 for block in self.blocks)

    @property
    def num_idle(self) -> int:
        """Cached slots that become used when the hit is acquired, without new allocations."""
        if not self.num_evicted:
            idle = sum(block.ref_count == 0 for block in self.blocks)
        else:
            idle = sum(block.ref_count == 0 <= block.slot for block in self.blocks)
            idle += sum(
                block.window_slots[at].readers == 0
                for at, gone in enumerate(self.num_evicted)
                for block in self.blocks[gone:]
            )
        if self.tail is None or self.owns_tail:
            return idle
        idle += self.tail.ref_count == 0 and self.tail.slot >= 0
        return idle + sum(window_slot.readers == 0 for window_slot in self.tail.window_slots)


def find_prefix_hit(
    pool: BlockPool, match: PrefixMatch, *, with_tail: bool = True, fork_at: int | None = None
) -> PrefixHit:
    """The longest hit in a match whose last windows are complete in all layer groups.

    Args:
        with_tail: whether part of a block may be copied.
        fork_at: token count from which other sequences must be able to continue too; None: only
            from the hit's end.
    """
    blocks, size = match.blocks, pool.block_size
    if pool.states.slots_per_state:
        return _hit_at_snapshot(match, size)
    tail = match.tail if with_tail and match.tail_tokens else None
    end = len(blocks) * size
    if not pool.window_slots.windows:
        return PrefixHit(blocks, tail, end + (match.tail_tokens if tail else 0))

    def num_evicted(num_tokens: int) -> tuple[int, ...]:
        return pool.window_slots.num_evicted(
            num_tokens if fork_at is None else min(num_tokens, fork_at)
        )

    runs = [_runs(blocks, group) for group in range(len(pool.window_slots.windows))]
    if tail is not None and all(window_slot.slot >= 0 for window_slot in tail.window_slots):
        gone = num_evicted(end + match.tail_tokens)
        if all(len(blocks) - first <= run[-1] for first, run in zip(gone, runs, strict=True)):
            return PrefixHit(blocks, tail, end + match.tail_tokens, num_evicted=gone)
    for count in range(len(blocks), -1, -1):
        gone = num_evicted(count * size)
        if all(count - first <= run[count] for first, run in zip(gone, runs, strict=True)):
            break
    return PrefixHit(blocks[:count], None, count * size, num_evicted=gone)


def _hit_at_snapshot(match: PrefixMatch, size: int) -> PrefixHit:
    """The longest hit that ends where a recurrent state is kept."""
    snapshot, before = match.snapshot, match.snapshot_at
    if snapshot is None:
        return PrefixHit([], None, 0)
    is_whole = snapshot.num_tokens == size
    return PrefixHit(
        match.blocks[: before + is_whole],
        None if is_whole else snapshot.block,
        before * size + snapshot.num_tokens,
        snapshot=snapshot,
    )


def _runs(blocks: list[Block], group: int) -> list[int]:
    """[blocks + 1] number of consecutive blocks with a slot in a group before each position."""
    runs = [0]
    for block in blocks:
        runs.append(runs[-1] + 1 if block.window_slots[group].slot >= 0 else 0)
    return runs


@dataclass(frozen=True, slots=True)
class AcquiredPrefix:
    """A prefix hit with references held for a sequence."""

    blocks: list[Block]
    """Block table of the hit's tokens."""
    sources: list[Block]
    """Sources of copies; release them when all blocks of the step are allocated."""
    num_swapped: int
    """Blocks copied from the host."""


def acquire_prefix(pool: BlockPool, hit: PrefixHit) -> AcquiredPrefix:
    """Reference a hit's blocks, swap in those on the host, and copy the tail."""
    tail = [] if hit.tail is None else [hit.tail]
    for at, block in enumerate((*hit.blocks, *tail)):
        pool.acquire(block, at, hit.num_evicted)
    if hit.owns_tail:
        pool.evict_subtree(tail[0])
        return AcquiredPrefix([*hit.blocks, *tail], [], _swap_in(pool, hit.blocks))
    # After all are referenced, so that allocating one cannot evict another.
    swapped = _swap_in(pool, hit.blocks)
    own = [pool.allocate() for _ in tail]
    for source, copy in zip(tail, own, strict=True):
        pool.copy(source, copy)
        swapped += source.slot < 0 <= source.host_slot
    return AcquiredPrefix([*hit.blocks, *own], tail, swapped)


def _swap_in(pool: BlockPool, blocks: list[Block]) -> int:
    absent = [block for block in blocks if block.slot < 0 <= block.host_slot]
    for block in absent:
        pool.swap_in(block)
    return len(absent)
