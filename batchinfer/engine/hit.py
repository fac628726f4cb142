"""The computed prefix that a sequence starts with."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.prefix_index import Block


@dataclass(frozen=True, slots=True)
class Hit:
    """Whole blocks to share, then part of one more to copy."""

    blocks: list[Block]
    tail: Block | None
    num_tokens: int
    keeps_tail: bool = False
    """Whether nobody else needs the tail: it leaves the index and is written on."""

    @property
    def joined(self) -> int:
        """Blocks that running sequences hold already; they lead, as tables share prefixes."""
        return sum(block.ref_count > 0 for block in self.blocks)

    @property
    def num_idle(self) -> int:
        """How many fewer blocks are available when the hit is taken, besides the table's own."""
        idle = sum(block.ref_count == 0 for block in self.blocks)
        if self.tail is None or self.keeps_tail:
            return idle
        return idle + (self.tail.ref_count == 0 and self.tail.slot >= 0)

    def without_tail(self, block_size: int) -> Hit:
        """Its whole blocks."""
        return Hit(self.blocks, None, len(self.blocks) * block_size)


@dataclass(frozen=True, slots=True)
class Taken:
    """A hit that a sequence refers to."""

    blocks: list[Block]
    """Of a table that holds the hit's tokens."""
    sources: list[Block]
    """Referenced because they are copied; to be released when all blocks of the step are there."""
    num_swapped: int
    """Blocks that were copied from the host."""


def take(pool: BlockPool, hit: Hit) -> Taken:
    """Refer to a hit's blocks, bring those on the host back and copy the tail."""
    tail = [] if hit.tail is None else [hit.tail]
    for block in (*hit.blocks, *tail):
        pool.acquire(block)
    if hit.keeps_tail:
        pool.forget(tail[0])
        return Taken([*hit.blocks, *tail], [], _bring_back(pool, hit.blocks))
    # Only now that all are referred to: making room for one must not take another.
    swapped = _bring_back(pool, hit.blocks)
    own = [pool.allocate() for _ in tail]
    for source, copy in zip(tail, own, strict=True):
        pool.copy(source, copy)
        swapped += source.slot < 0
    return Taken([*hit.blocks, *own], tail, swapped)


def _bring_back(pool: BlockPool, blocks: list[Block]) -> int:
    absent = [block for block in blocks if block.slot < 0]
    for block in absent:
        pool.bring_back(block)
    return len(absent)
