"""Statistics of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one step; blocks are counted before rows leave that it finishes."""

    step: int
    t_s: float
    """Seconds since the engine's first step began, at the end of this one."""
    step_ms: float
    num_running: int
    """Sequences with blocks in the pool."""
    num_waiting: int
    """Sequences in the queue; the samples of a row that has not begun count as one."""
    num_swapped: int
    """Sequences in the queue that have blocks on the host only."""
    num_preempted: int
    """Sequences that lost their blocks in this step."""
    prefill_tokens: int
    """Tokens computed for prompts, and tokens computed again."""
    decode_tokens: int
    """Output tokens computed for the first time."""
    recomputed_tokens: int
    cached_tokens: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_shared: int
    kv_blocks_cached: int
    kv_tokens_live: int
    """Distinct token slots that hold KV of unfinished sequences."""
    kv_waste: float
    """1 - kv_tokens_live / (kv_blocks_used * block_size)."""
    kv_logical_blocks: int
    """Lengths of all block tables but for what left a window, sharing not deducted."""
    kv_tokens_logical: int
    contiguous_blocks: int
    """Blocks that reserving prompt + max_tokens for every running sequence would take."""
    cow_copies: int
    swapped_in_blocks: int
    """Blocks copied from the host."""
    swapped_out_blocks: int
    """Blocks copied to the host: of sequences that wait, and of prefixes that rows to come need."""

    @property
    def pool_use(self) -> float | None:
        """Used share of the KV blocks; None: there is no pool."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else None
