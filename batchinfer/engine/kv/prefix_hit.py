"""Prefix hits: the computed prefixes that sequences start with."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_index import Block, PrefixMatch


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Indexed prefix of a sequence: whole blocks to share, then part of one more to copy."""

    blocks: list[Block]
    tail: Block | None
    num_tokens: int
    owns_tail: bool = False
    """Whether nobody else needs the tail: it leaves the index and is written on."""
    num_evicted: tuple[int, ...] = ()
    """Leading blocks before each window."""

    @property
    def num_shared(self) -> int:
        """Blocks that running sequences hold already; they lead, as tables share prefixes."""
        return sum(block.ref_count > 0 for block in self.blocks)

    @property
    def num_idle(self) -> int:
        """Cached slots that become used when the hit is acquired, besides those newly allocated."""
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
    """The longest hit in a match that has its last windows in all layer groups.

    Args:
        pool: the KV pool's blocks.
        match: from the index.
        with_tail: whether part of a block may be copied.
        fork_at: tokens from which others must be able to go on too; None: from the hit's end alone.
    """
    blocks, size = match.blocks, pool.block_size
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


def _runs(blocks: list[Block], group: int) -> list[int]:
    """[blocks + 1] consecutive blocks before each place with a slot in a group."""
    runs = [0]
    for block in blocks:
        runs.append(runs[-1] + 1 if block.window_slots[group].slot >= 0 else 0)
    return runs


@dataclass(frozen=True, slots=True)
class AcquiredPrefix:
    """A prefix hit whose blocks a sequence refers to."""

    blocks: list[Block]
    """Block table that holds the hit's tokens."""
    sources: list[Block]
    """Referenced because they are copied; to be released when all blocks of the step are there."""
    num_swapped: int
    """Blocks that were copied from the host."""


def acquire_prefix(pool: BlockPool, hit: PrefixHit) -> AcquiredPrefix:
    """Refer to a hit's blocks, bring those on the host back and copy the tail."""
    tail = [] if hit.tail is None else [hit.tail]
    for at, block in enumerate((*hit.blocks, *tail)):
        pool.acquire(block, at, hit.num_evicted)
    if hit.owns_tail:
        pool.evict_subtree(tail[0])
        return AcquiredPrefix([*hit.blocks, *tail], [], _swap_in(pool, hit.blocks))
    # Only now that all are referred to: making room for one must not take another.
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
