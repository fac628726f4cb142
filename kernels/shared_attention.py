"""Attention of decodes to pieces of context that several of them have in the same blocks.

One program has a tile of rows (sequences that share the piece, times the query heads of one KV
head) and reads the piece once for all of them: a product of matrices where each sequence alone
would multiply by a few rows. What a row gets is a partial state as of any piece, which
`_merge_kernel` joins with the row's others.

Sources: attention to a shared prefix by all of its sequences at once, joined with their own parts
by log-sum-exp, is Hydragen (Juravsky et al. 2024, arXiv:2402.05099); over a tree of prefixes it is
the cascade of FlashInfer (Ye et al. 2025, arXiv:2501.01005).
"""

from typing import Any

import triton
import triton.language as tl

from batchinfer.kernels.attend import (
    Heads,
    LaunchConfig,
    attend,
    initial_state,
    load_query,
)
from batchinfer.kernels.decode_work import DecodeWork, shared_rows
from batchinfer.kernels.launch import OPTIONS
from batchinfer.kernels.residency import launch_resident


def shared_config(heads: Heads) -> LaunchConfig:
    """Launch shape: 64 rows, or one token's heads where a group has more.

    Pieces of a small tree then cost little more than reading them; a large one is read from the L2
    once for every tile. The sums of wide heads take most registers, and float8 some to be widened:
    tiles are short there, and one is fetched ahead.
    """
    rows, fp8 = shared_rows(heads.group), heads.cache_bytes == 1
    if heads.query_bytes == 4:
        return LaunchConfig(rows, tile=16, num_warps=8, num_stages=2)
    if heads.widths > 256:
        if fp8 or rows > 64:
            return LaunchConfig(rows, tile=16, num_warps=8, num_stages=3)
        return LaunchConfig(rows, tile=32, num_warps=4, num_stages=3)
    return LaunchConfig(rows, tile=64, num_warps=4, num_stages=5)


def attend_shared(
    shared: dict[str, Any],
    partials: dict[str, Any],
    heads: Heads,
    work: DecodeWork,
    launch: int,
) -> None:
    """Compute the partial states of shared pieces.

    Args:
        shared: the arguments of all kinds of programs.
        partials: those of what they leave for the merge.
        launch: which of the launches that the work list is for.
    """
    config = shared_config(heads)
    unused = ("context_lens_ptr", "out_ptr", "window", "WINDOWED")
    arguments = {
        name: value
        for name, value in shared.items()
        if name not in unused and not name.startswith("out_")
    }
    launch_resident(
        _shared_kernel,
        len(work.items) * shared["NUM_KV_HEADS"],
        **arguments,
        **partials,
        order_ptr=work.order,
        decode_shared_ptr=work.decode_shared,
        items_ptr=work.items,
        counters_ptr=work.counters,
        num_counters=work.counters.shape[1],
        launch=launch,
        num_sequences=len(work.items) // work.max_pieces,
        SEQUENCES=work.tile_sequences,
        TILE=min(config.tile, work.piece),
        ROWS=config.rows,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )


@triton.jit
def _sequences_of_tile(
    decode_shared_ptr,  # [S] int32
    place,  # in the order, of the first
    end,  # of the piece
    num_sequences,
    SEQUENCES: tl.constexpr,  # at most
    ROWS: tl.constexpr,
):
    # Up to the first that does not share the piece with the one before it.
    after = tl.arange(0, ROWS)
    places = place + after
    shared = tl.load(decode_shared_ptr + places, mask=places < num_sequences, other=0)
    leaves = (after > 0) & (shared < end)
    return tl.min(tl.where(leaves, tl.minimum(after, SEQUENCES), SEQUENCES))


@triton.jit(
    do_not_specialize=["table_stride", "max_pieces", "num_counters", "launch", "num_sequences"]
)
def _shared_kernel(
    query_ptr,  # [T, Hq, Dk]
    key_ptr,  # [num_slots, Hkv, block_size, Dk]
    value_ptr,  # [num_slots, Hkv, block_size, Dv]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    sinks_ptr,  # [Hq] or None
    order_ptr,  # [S] int32
    decode_shared_ptr,  # [S] int32
    items_ptr,  # [N, 2] int32: place in the order of a tile's first sequence, piece
    counters_ptr,  # [2, num_counters] int32: items, then taken items of each launch
    partial_out_ptr,  # [S, Hq, max_pieces, Dv] float32, not divided by the sum
    partial_max_ptr,  # [S, Hq, max_pieces] float32
    partial_sum_ptr,  # [S, Hq, max_pieces] float32
    query_row_stride,
    query_head_stride,
    query_width_stride,
    key_slot_units,
    key_token_units,
    key_head_stride,
    key_width_stride,
    value_slot_units,
    value_token_units,
    value_head_stride,
    value_width_stride,
    table_stride,
    score_scale,
    cap,
    max_pieces,
    num_counters,
    launch,  # of those that share the work list
    num_sequences,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,  # elements, of where a token lies
    ROW_TYPE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    TURNED: tl.constexpr,
    CAPPED: tl.constexpr,
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,  # of a tile
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    key_columns = tl.arange(0, KEY_BLOCK)
    value_columns = tl.arange(0, VALUE_BLOCK)
    # Read again for each item: registers are scarce.
    ticket = tl.atomic_add(counters_ptr + num_counters + 1 + launch, 1)
    while ticket < tl.load(counters_ptr + num_counters) * NUM_KV_HEADS:
        # Those of single sequences come first.
        item = (tl.load(counters_ptr) + ticket // NUM_KV_HEADS).to(tl.int64)
        kv_head = ticket % NUM_KV_HEADS  # int32 as the offsets of heads in a slot
        place = tl.load(items_ptr + 2 * item)
        piece = tl.load(items_ptr + 2 * item + 1)
        end = (piece + 1) * PIECE
        count = _sequences_of_tile(decode_shared_ptr, place, end, num_sequences, SEQUENCES, ROWS)
        live_rows = count * GROUP
        row_live = rows < live_rows
        sequences = tl.load(order_ptr + place + rows // GROUP, mask=row_live, other=0).to(tl.int64)
        query_rows = tl.load(query_starts_ptr + sequences).to(tl.int64)
        heads = kv_head * GROUP + rows % GROUP
        query, scales = load_query(
            (query_ptr + kv_head * GROUP * query_head_stride + key_columns * query_width_stride)[
                None, :
            ]
            + (query_rows * query_row_stride + rows % GROUP * query_head_stride)[:, None],
            row_live[:, None] & (key_columns[None, :] < KEY_WIDTH),
            score_scale,
            key_ptr.dtype.element_ty,
        )
        # The sinks count once: the first piece has them.
        holds_sinks = rows < tl.where(piece == 0, live_rows, 0)
        row_max, row_sum = initial_state(sinks_ptr, heads, holds_sinks, ROWS)
        # Every row sees the whole piece, in the blocks of any of its sequences.
        table_row = tl.load(order_ptr + place).to(tl.int64)
        row_max, row_sum, acc = attend(
            query,
            rows,
            piece * PIECE,
            end,
            row_max,
            row_sum,
            tl.zeros([ROWS, VALUE_BLOCK], tl.float32),
            key_ptr + kv_head * key_head_stride,
            value_ptr + kv_head * value_head_stride,
            table_ptr + table_row * table_stride,
            key_slot_units, key_token_units, key_width_stride,
            value_slot_units, value_token_units, value_width_stride,
            scales, cap, 0,
            BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
            UNIT, ROW_TYPE, SAME_ROWS, TURNED, False, CAPPED, TILE, False,
        )  # fmt: skip
        # Found again, in int32: registers are scarce, and the workspace is small. Clamped: the same
        # load as above would be taken from there.
        places = tl.minimum(place + rows // GROUP, num_sequences - 1)
        sequences = tl.load(order_ptr + places)
        partials = (sequences * (NUM_KV_HEADS * GROUP) + heads) * max_pieces + piece
        tl.store(partial_max_ptr + partials, row_max, mask=row_live)
        tl.store(partial_sum_ptr + partials, row_sum, mask=row_live)
        partial_ptrs = partial_out_ptr + partials[:, None] * VALUE_WIDTH + value_columns[None, :]
        tl.store(partial_ptrs, acc, mask=row_live[:, None] & (value_columns[None, :] < VALUE_WIDTH))
        ticket = tl.atomic_add(counters_ptr + num_counters + 1 + launch, 1)
