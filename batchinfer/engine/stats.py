"""Statistics of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one step. Block counts include the blocks of rows that finish in this step."""

    step: int
    t_s: float
    """Seconds from the start of the engine's first step to the end of this step."""
    step_ms: float
    num_running: int
    """Sequences with blocks in the pool."""
    num_waiting: int
    """Sequences in the queue. The samples of a row that has not started count as one sequence."""
    num_swapped: int = 0
    """Waiting sequences whose blocks are only on the host."""
    num_preempted: int = 0
    prefill_tokens: int = 0
    """Prompt tokens and recomputed tokens that this step computed."""
    decode_tokens: int = 0
    """Output tokens computed for the first time."""
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_shared: int = 0
    kv_blocks_cached: int = 0
    kv_tokens_live: int = 0
    """Distinct token slots that hold KV of unfinished sequences."""
    kv_waste: float = 0.0
    """1 - kv_tokens_live / (kv_blocks_used * block_size)."""
    kv_logical_blocks: int = 0
    """Sum of the block table lengths. The sum excludes blocks outside windows and counts a shared
    block once per table."""
    kv_tokens_logical: int = 0
    state_slots_used: int = 0
    """Used blocks that hold recurrent state. Each such block counts as full of tokens."""
    contiguous_blocks: int = 0
    """Blocks needed if every running sequence reserved space for its prompt + max_tokens."""
    cow_copies: int = 0
    swapped_in_blocks: int = 0
    """Blocks copied from the host."""
    swapped_out_blocks: int = 0
    """Blocks copied to the host, because a waiting sequence or a later row needs them."""

    images: int = 0
    """Distinct images with tokens that this step computed."""
    image_tokens: int = 0
    """Tokens of images among the computed tokens."""
    images_encoded: int = 0
    """Images that the vision tower encoded in this step. Earlier steps encoded the step's other
    images."""
    encode_ms: float = 0.0
    """Milliseconds that the vision tower took; part of ``step_ms``."""

    @property
    def pool_use(self) -> float | None:
        """Share of the KV blocks that is used; None for an encoder, which has no pool."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else None
