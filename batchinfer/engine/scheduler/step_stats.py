"""Computes the statistics of a step: its sequences, its tokens and its use of the pool."""

from __future__ import annotations

import numpy as np

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.scheduler.schedule import Schedule
from batchinfer.engine.scheduler.sequence_table import Rows, SequenceTable
from batchinfer.engine.stats import StepStats


def step_stats(
    table: SequenceTable,
    pool: BlockPool,
    schedule: Schedule,
    tokens: tuple[int, int, int],
    *,
    step: int,
    num_waiting: int,
    num_swapped: int,
) -> StepStats:
    """Return the statistics of a step. Times are 0 until the step's result is read.

    Call it when ``num_computed`` already includes the step's tokens, but before the rows of
    finished sequences are freed.

    Args:
        tokens: result of ``step_tokens.note_tokens``.
        num_swapped: number of waiting sequences with blocks that are only on the host.
    """
    rows = table.rows()
    live = _live_tokens(table, pool, rows)
    num_evicted = table.num_evicted(table.num_computed[rows])
    used_tokens = pool.num_used * pool.block_size
    state_slots = len(rows) * pool.states.slots_per_state
    prefill, decode, recomputed = tokens
    return StepStats(
        step=step,
        t_s=0.0,
        step_ms=0.0,
        num_running=len(rows),
        num_waiting=num_waiting,
        num_swapped=num_swapped,
        num_preempted=schedule.num_preempted,
        prefill_tokens=prefill,
        decode_tokens=decode,
        recomputed_tokens=recomputed,
        cached_tokens=schedule.num_cached,
        kv_blocks_total=pool.num_blocks,
        kv_blocks_used=pool.num_used,
        kv_blocks_shared=pool.num_shared,
        kv_blocks_cached=pool.num_cached,
        kv_tokens_live=live,
        kv_waste=1 - live / used_tokens if used_tokens else 0.0,
        kv_logical_blocks=int((table.num_blocks[rows] - num_evicted).sum()) + state_slots,
        kv_tokens_logical=int((table.num_computed[rows] - num_evicted * pool.block_size).sum())
        + state_slots * pool.block_size,
        contiguous_blocks=int((-(-table.max_total[rows] // pool.block_size)).sum())
        * pool.slots_per_block
        + state_slots,
        state_slots_used=pool.states.num_used,
        cow_copies=len(schedule.block_copies.within),
        swapped_in_blocks=len(schedule.block_copies.ins),
        swapped_out_blocks=len(schedule.block_copies.outs),
    )


def _live_tokens(table: SequenceTable, pool: BlockPool, rows: Rows) -> int:
    """Return the number of tokens in used slots.

    Only the last block of a sequence may be partly filled, and sequences that share a last block
    fill it equally. Slots of recurrent states count as full.
    """
    last = table.num_blocks[rows] - 1
    slots = table.block_table[rows, last]
    filled = table.num_computed[rows] - last * pool.block_size
    # Combine slot and fill into one number per row, so that sorting groups rows by last block.
    width = pool.block_size + 1
    by_slot = np.sort(slots.astype(np.int64) * width + filled)
    distinct = by_slot[np.diff(by_slot // width, append=-1) != 0]
    groups = pool.slots_per_block
    num_full = pool.num_used - groups * len(distinct)
    return num_full * pool.block_size + groups * int((distinct % width).sum())
