"""Statistics of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one step; blocks are counted before finished rows leave."""

    step: int
    t_s: float
    """Seconds from the start of the engine's first step to the end of this one."""
    step_ms: float
    num_running: int
    """Sequences with blocks in the pool."""
    num_waiting: int
    """Sequences in the queue; all samples of a row that has not started count as one."""
    num_swapped: int
    """Sequences in the queue with blocks on the host only."""
    num_preempted: int
    """Sequences that lost their blocks in this step."""
    prefill_tokens: int
    """Tokens computed for prompts, and recomputed tokens."""
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
    """Lengths of all block tables without blocks behind windows; shared blocks count repeatedly."""
    kv_tokens_logical: int
    state_slots_used: int
    """Those of ``kv_blocks_used`` that hold recurrent states. In all counts of tokens, such a slot
    counts as a full block."""
    contiguous_blocks: int
    """Blocks needed to reserve prompt + max_tokens for every running sequence."""
    cow_copies: int
    swapped_in_blocks: int
    """Blocks copied from the host."""
    swapped_out_blocks: int
    """Blocks copied to the host, of waiting sequences and of prefixes that later rows need."""

    @property
    def pool_use(self) -> float | None:
        """Share of KV blocks used; None without a pool."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else None
