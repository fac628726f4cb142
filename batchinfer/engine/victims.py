"""What becomes of the blocks of a sequence that is preempted: kept for it, or computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from typing import Literal

from batchinfer.engine.prefix_index import Block

Preemption = Literal["auto", "recompute", "swap"]

_WEIGHT = 0.2
"""Of a step against those before it."""
_MOSTLY = 0.8
"""A step with at least this share of prompt tokens says how long one takes."""
_FIRST_TOKEN_S = 1e-4
"""Until one was measured, which is before anything can be preempted."""


class Victims:
    """Chooses for each victim what takes less time.

    To swap is to move its blocks to the host and back: the bytes over the copies' bandwidth. To
    recompute is to compute their tokens again, at the speed of this run's prompts. Blocks that
    others hold as well are not given up and cost nothing.

    Args:
        preemption: ``auto``, or what to do without looking.
        block_copy_s: seconds to copy a block one way.
    """

    def __init__(self, preemption: Preemption = "recompute", block_copy_s: float = 0.0) -> None:
        self._preemption = preemption
        self.block_copy_s = block_copy_s
        self.token_s = _FIRST_TOKEN_S
        """Seconds to compute a token of a prompt."""

    def observe(self, seconds: float, prefill_tokens: int, decode_tokens: int) -> None:
        """A step took so long for so many tokens."""
        tokens = prefill_tokens + decode_tokens
        if prefill_tokens < _MOSTLY * tokens or tokens == 0:
            return
        self.token_s += _WEIGHT * (seconds / tokens - self.token_s)

    def swaps(self, tables: Items[list[Block]], block_size: int) -> bool:
        """Whether the blocks of sequences that are preempted together are worth keeping."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        held = Counter(block for table in tables for block in table)
        own = [block for block, count in held.items() if block.ref_count == count]
        copies = len(own) + sum(block.host_slot < 0 for block in own)
        return copies * self.block_copy_s < len(own) * block_size * self.token_s
