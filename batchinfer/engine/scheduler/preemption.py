"""Preemption: recompute or swap a sequence's blocks, evicted by their known reuse.

Nothing is kept for a known future use (a sequence that waits, a row to come); it only orders
eviction, and says what is worth a place on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Literal

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_index import Block
from batchinfer.engine.sequence import Sequence

Preemption = Literal["auto", "recompute", "swap"]

_WEIGHT = 0.2
"""Weight of a step against those before it."""
_MOSTLY = 0.8
"""A step with at least this share of prompt tokens says how long one takes."""
_FIRST_TOKEN_S = 1e-4
"""Until one was measured, which is before anything can be preempted."""


class PreemptionPolicy:
    """Chooses swapping or recomputing for each victim, whichever takes less time.

    To swap is to move its blocks to the host and back: the bytes over the copies' bandwidth. To
    recompute is to compute their tokens again, at the speed of this run's prompts. Blocks that
    others hold as well are not freed and cost nothing.

    Args:
        preemption: ``auto``, or the one to take always.
        block_copy_s: seconds to copy a block one way.
    """

    def __init__(self, preemption: Preemption = "recompute", block_copy_s: float = 0.0) -> None:
        self._preemption = preemption
        self.block_copy_s = block_copy_s
        self.token_s = _FIRST_TOKEN_S
        """Seconds to compute a token of a prompt."""

    def observe(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Update the estimate of ``token_s`` by a step's time."""
        tokens = prefill_tokens + decode_tokens
        if prefill_tokens < _MOSTLY * tokens or tokens == 0:
            return
        self.token_s += _WEIGHT * (seconds / tokens - self.token_s)

    def should_swap(self, tables: Items[list[Block]], block_size: int) -> bool:
        """Whether the blocks of sequences that are preempted together are worth keeping."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        held = Counter(block for table in tables for block in table)
        own = [block for block, count in held.items() if block.ref_count == count]
        copies = len(own) + sum(block.host_slot < 0 for block in own)
        return copies * self.block_copy_s < len(own) * block_size * self.token_s


class ReuseHints:
    """Marks blocks with their known future use.

    Args:
        pool: the KV pool's blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._waiting: dict[Sequence, list[Block]] = {}
        """Waiting sequences, with the indexed blocks that they begin with."""
        self._num_swapped = 0
        self._counted_at = -1

    @property
    def num_swapped(self) -> int:
        """Waiting sequences that have blocks on the host only."""
        changes = self._pool.host.changes
        if self._counted_at != changes:
            self._counted_at = changes
            self._num_swapped = sum(
                any(block.slot < 0 <= block.host_slot for block in blocks)
                for blocks in self._waiting.values()
            )
        return self._num_swapped

    def add(self, sequence: Sequence, blocks: Iterable[Block]) -> None:
        """Mark the indexed ``blocks`` that a waiting sequence begins with."""
        self.remove(sequence)
        self._waiting[sequence] = list(blocks)
        self._counted_at = -1
        for block in reversed(self._waiting[sequence]):  # the last first, as in ``remove``
            block.waiters += 1
            if block.waiters == 1:
                self._pool.update_priority(block)

    def is_private_tail(self, sequence: Sequence, block: Block | None) -> bool:
        """Whether a block is the end of what a sequence computed, and nobody else needs it."""
        return (
            block is not None
            and self._waiting.get(sequence, [None])[-1] is block
            and block.ref_count == 0
            and block.slot >= 0
            and block.children is None
            and block.waiters == 1
            and not block.used_later
        )

    def remove(self, sequence: Sequence) -> None:
        """Unmark the blocks of a sequence that waits no longer."""
        blocks = self._waiting.pop(sequence, None)
        if blocks is None:
            return
        self._counted_at = -1
        for block in reversed(blocks):  # the last go first, as in ``BlockPool.release``
            block.waiters -= 1
            if block.waiters == 0:
                self._pool.update_priority(block)

    def remove_all(self) -> None:
        """Unmark the blocks of all waiting sequences."""
        for sequence in list(self._waiting):
            self.remove(sequence)

    def note_use(self, sequence: Sequence) -> None:
        """Mark which prompt blocks of a sequence that is done rows to come need.

        The row that arrived last of those that used a block says so.
        """
        size, shared = self._pool.block_size, self._num_reused(sequence)
        prompt_blocks = -(-sequence.request.num_prompt_tokens // size)
        for at, block in enumerate(sequence.blocks[:prompt_blocks]):
            self._note(block, sequence, used_later=at < shared)

    def note_copied(self, source: Block, at: int, sequence: Sequence) -> None:
        """Mark a block, number ``at`` of a prompt, that a sequence copied to write its end anew.

        A sequence that goes another way within the block says nothing of it.
        """
        size = self._pool.block_size
        if sequence.key(at * size, (at + 1) * size) == source.key:
            self._note(source, sequence, used_later=at < self._num_reused(sequence))

    def _num_reused(self, sequence: Sequence) -> int:
        """Leading blocks of a sequence's prompt that rows to come begin with."""
        request = sequence.request
        reused = request.reused_prefix_len
        if request.params.prompt_logprobs is not None:
            # What this row had to compute for its logits, rows to come do for theirs.
            reused = min(reused, request.logits_from)
        # Whole blocks: any of several may serve part of one, and the others would be kept for
        # nobody.
        return reused // self._pool.block_size

    def _note(self, block: Block, sequence: Sequence, *, used_later: bool) -> None:
        arrival = sequence.state.arrival
        if sequence.request.first_sample:
            return  # further samples of a row arrive after rows that its first ones spoke of
        if arrival >= block.last_arrival:
            block.last_arrival, block.used_later = arrival, used_later
            if block.window_slots:  # some may have been freed before
                self._pool.update_priority(block)
