"""Preemption: recompute or swap a sequence's blocks, and eviction by known future use.

A known future use (by a waiting sequence or a later row) does not reserve a block; it only affects
the eviction order and decides what is worth a host slot.
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
"""Weight of a step in the moving average."""
_MOSTLY = 0.8
"""Least share of prompt tokens in a step that counts as a measurement."""
_FIRST_TOKEN_S = 1e-4
"""Initial estimate; a measurement comes before the first preemption."""


class PreemptionPolicy:
    """Chooses to swap or to recompute a preempted sequence, by the time that each takes.

    Swapping moves its blocks to the host and back, at the bandwidth of copies. Recomputing computes
    their tokens again, at the speed of this run's prompts. Blocks shared with others are not freed
    and cost nothing.

    Args:
        preemption: ``auto``, or a fixed choice.
        block_copy_s: seconds to copy a block one way.
    """

    def __init__(self, preemption: Preemption = "recompute", block_copy_s: float = 0.0) -> None:
        self._preemption = preemption
        self.block_copy_s = block_copy_s
        self.token_s = _FIRST_TOKEN_S
        """Estimated seconds to compute a prompt token."""

    def observe(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Update ``token_s`` from a step's time."""
        tokens = prefill_tokens + decode_tokens
        if prefill_tokens < _MOSTLY * tokens or tokens == 0:
            return
        self.token_s += _WEIGHT * (seconds / tokens - self.token_s)

    def should_swap(self, tables: Items[list[Block]], block_size: int) -> bool:
        """Whether to swap the blocks of sequences that are preempted together."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        held = Counter(block for table in tables for block in table)
        own = [block for block, count in held.items() if block.ref_count == count]
        copies = len(own) + sum(block.host_slot < 0 for block in own)
        return copies * self.block_copy_s < len(own) * block_size * self.token_s


class ReuseHints:
    """Marks blocks with their known future use."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._waiting: dict[Sequence, list[Block]] = {}
        """Waiting sequences with their indexed blocks."""
        self._num_swapped = 0
        self._counted_at = -1

    @property
    def num_swapped(self) -> int:
        """Waiting sequences with blocks on the host only."""
        changes = self._pool.host.changes
        if self._counted_at != changes:
            self._counted_at = changes
            self._num_swapped = sum(
                any(block.slot < 0 <= block.host_slot for block in blocks)
                for blocks in self._waiting.values()
            )
        return self._num_swapped

    def add(self, sequence: Sequence, blocks: Iterable[Block]) -> None:
        """Mark the indexed ``blocks`` of a waiting sequence."""
        self.remove(sequence)
        self._waiting[sequence] = list(blocks)
        self._counted_at = -1
        for block in reversed(self._waiting[sequence]):  # last blocks first, as in ``remove``
            block.waiters += 1
            if block.waiters == 1:
                self._pool.update_priority(block)

    def is_private_tail(self, sequence: Sequence, block: Block | None) -> bool:
        """Whether a block is the end of a sequence's computed tokens and has no other use."""
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
        """Unmark the blocks of a sequence that no longer waits."""
        blocks = self._waiting.pop(sequence, None)
        if blocks is None:
            return
        self._counted_at = -1
        for block in reversed(blocks):  # last blocks first, as in ``BlockPool.release``
            block.waiters -= 1
            if block.waiters == 0:
                self._pool.update_priority(block)

    def remove_all(self) -> None:
        """Unmark the blocks of all waiting sequences."""
        for sequence in list(self._waiting):
            self.remove(sequence)

    def note_use(self, sequence: Sequence) -> None:
        """Mark which prompt blocks of a finished sequence later rows need.

        The row with the latest arrival among a block's users decides.
        """
        size, shared = self._pool.block_size, self._num_reused(sequence)
        prompt_blocks = -(-sequence.request.num_prompt_tokens // size)
        for at, block in enumerate(sequence.blocks[:prompt_blocks]):
            self._note(block, sequence, used_later=at < shared)

    def note_copied(self, source: Block, at: int, sequence: Sequence) -> None:
        """Mark a prompt's block number ``at`` that a sequence copied to rewrite its end.

        A sequence that diverges within the block does not affect the mark.
        """
        size = self._pool.block_size
        if sequence.key(at * size, (at + 1) * size) == source.key:
            self._note(source, sequence, used_later=at < self._num_reused(sequence))

    def _num_reused(self, sequence: Sequence) -> int:
        """Leading blocks of a sequence's prompt that later rows share."""
        request = sequence.request
        reused = request.reused_prefix_len
        if request.params.prompt_logprobs is not None:
            # Later rows compute these positions themselves for their logits.
            reused = min(reused, request.logits_from)
        # Only whole blocks: one of several blocks would serve a part, the others would be unused.
        return reused // self._pool.block_size

    def _note(self, block: Block, sequence: Sequence, *, used_later: bool) -> None:
        arrival = sequence.state.arrival
        if sequence.request.first_sample:
            return  # further samples of a row arrive after the later rows already did
        if arrival >= block.last_arrival:
            block.last_arrival, block.used_later = arrival, used_later
            if block.window_slots:  # some may have been freed before
                self._pool.update_priority(block)
