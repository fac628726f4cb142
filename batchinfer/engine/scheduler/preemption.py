"""Preemption by recomputing or swapping, and eviction by known future use.

A block has a known future use if a waiting sequence or a later row needs it. The pool evicts such
blocks last, and may move them to host slots.
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
"""Weight of a step in the moving average of ``token_s``."""
_MOSTLY = 0.8
"""Smallest share of prompt tokens that a step must have for its time to update ``token_s``."""
_FIRST_TOKEN_S = 1e-4
"""Initial value of ``token_s``. A measurement replaces it before the first preemption."""


class PreemptionPolicy:
    """Chooses between swapping and recomputing a preempted sequence, by the time that each takes.

    Swapping copies the sequence's blocks to the host and back, at the measured bandwidth of copies.
    Recomputing computes their tokens again, at the measured speed of this run's prefill. Blocks
    that other sequences share are not freed, so the comparison ignores them.

    Args:
        preemption: ``auto``, or the choice for all sequences.
        block_copy_s: seconds to copy a block in one direction.
    """

    def __init__(self, preemption: Preemption = "recompute", block_copy_s: float = 0.0) -> None:
        self._preemption = preemption
        self.block_copy_s = block_copy_s
        self.token_s = _FIRST_TOKEN_S
        """Estimated seconds to compute a prompt token."""

    def observe(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        tokens = prefill_tokens + decode_tokens
        if prefill_tokens < _MOSTLY * tokens or tokens == 0:
            return
        self.token_s += _WEIGHT * (seconds / tokens - self.token_s)

    def should_swap(
        self, tables: Items[list[Block]], block_size: int, slots_per_state: int = 0
    ) -> bool:
        """Return true if sequences that are preempted together should be swapped.

        Args:
            tables: blocks of each sequence.
            slots_per_state: slots of a sequence's recurrent state.
        """
        if self._preemption != "auto":
            return self._preemption == "swap"
        held = Counter(block for table in tables for block in table)
        freed = [block for block, count in held.items() if block.ref_count == count]
        copies = sum((block.slot >= 0) + (block.slot >= 0 > block.host_slot) for block in freed)
        copies += 2 * slots_per_state
        # Without its recurrent state, a sequence also recomputes the tokens in shared blocks.
        num_recomputed = sum(map(len, tables)) if slots_per_state else len(freed)
        return copies * self.block_copy_s < num_recomputed * block_size * self.token_s


class ReuseHints:
    """Marks blocks with their known future use."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._waiting: dict[Sequence, list[Block]] = {}
        """Indexed blocks of each waiting sequence."""
        self._num_swapped = 0
        self._counted_at = -1

    @property
    def num_swapped(self) -> int:
        """Number of waiting sequences with blocks or recurrent states that are only on the host."""
        changes = self._pool.host.changes
        if self._counted_at != changes:
            self._counted_at = changes
            self._num_swapped = sum(
                any(block.slot < 0 <= block.host_slot or _has_swapped(block) for block in blocks)
                for blocks in self._waiting.values()
            )
        return self._num_swapped

    def add(self, sequence: Sequence, blocks: Iterable[Block]) -> None:
        """Mark the indexed ``blocks`` of a waiting sequence."""
        self.remove(sequence)
        self._waiting[sequence] = list(blocks)
        self._counted_at = -1
        for block in reversed(self._waiting[sequence]):  # last block first, like ``remove``
            block.waiters += 1
            if block.waiters == 1:
                self._pool.update_priority(block)

    def is_private_tail(self, sequence: Sequence, block: Block | None) -> bool:
        """Return true if a block holds the end of a waiting sequence's computed tokens, and nothing
        else needs the block."""
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
        blocks = self._waiting.pop(sequence, None)
        if blocks is None:
            return
        self._counted_at = -1
        for block in reversed(blocks):  # last block first, like ``BlockPool.release``
            block.waiters -= 1
            if block.waiters == 0:
                self._pool.update_priority(block)

    def remove_all(self) -> None:
        for sequence in list(self._waiting):
            self.remove(sequence)

    def note_use(self, sequence: Sequence) -> None:
        """Mark which of a finished sequence's prompt blocks later rows need.

        If several rows used a block, the last row to arrive sets the mark.
        """
        size, shared = self._pool.block_size, self._num_reused(sequence)
        prompt_blocks = -(-sequence.request.num_prompt_tokens // size)
        for at, block in enumerate(sequence.blocks[:prompt_blocks]):
            self._note(block, sequence, used_later=at < shared)

    def note_copied(self, source: Block, at: int, sequence: Sequence) -> None:
        """Mark the future use of ``source``, block ``at`` of a prompt, after a sequence copied it
        to write to the copy.

        A sequence that diverges within the block does not change the mark.
        """
        size = self._pool.block_size
        if sequence.key(at * size, (at + 1) * size) == source.key:
            self._note(source, sequence, used_later=at < self._num_reused(sequence))

    def _num_reused(self, sequence: Sequence) -> int:
        """Return the number of leading blocks of a sequence's prompt that later rows share."""
        request = sequence.request
        reused = request.reused_prefix_len
        if request.params.prompt_logprobs is not None:
            # Later rows need the logits from this position on, so they compute these tokens
            # themselves.
            reused = min(reused, request.logits_from)
        # Count only whole blocks. Several rows may have a block that partly matches a later row's
        # prompt, but the later row copies from at most one of them.
        return reused // self._pool.block_size

    def _note(self, block: Block, sequence: Sequence, *, used_later: bool) -> None:
        arrival = sequence.state.arrival
        if sequence.request.first_sample:
            return  # follow-up requests arrive after later rows, whose marks must stay
        if arrival >= block.last_arrival:
            block.last_arrival, block.used_later = arrival, used_later
            if block.window_slots:  # some slots may already be in the eviction order
                self._pool.update_priority(block)


def _has_swapped(block: Block) -> bool:
    return any(snapshot.state.on_host for snapshot in block.snapshots)
