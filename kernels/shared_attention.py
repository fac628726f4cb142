"""Decode attention over pieces of context whose blocks several sequences share.

One program computes a tile of rows (one for each sequence that shares the piece and each query head
of one KV head), and reads the piece once for all rows. Each row's partial state is then merged with
the states of its other pieces.

Sources: Hydragen (Juravsky et al. 2024, arXiv:2402.05099) computes attention to a shared prefix for
all sequences at once and joins it with attention to the sequences' own parts by log-sum-exp;
FlashInfer's cascade (Ye et al. 2025, arXiv:2501.01005) does this for a tree of prefixes.
"""

from typing import Any

import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import (
    Heads,
    LaunchConfig,
    attend,
    initial_state,
    load_query,
)
from batchinfer.kernels.decode_plan import DecodeWork, shared_rows
from batchinfer.kernels.launch import OPTIONS, num_persistent
from batchinfer.kernels.split_kv import store_partials


def shared_config(heads: Heads) -> LaunchConfig:
    """Return the launch shape: 64 rows, unless the heads of one token need more.

    If few sequences share a piece, most of the 64 rows are padding, but attending to the piece
    takes little more time than reading it. If many sequences share a piece, each tile of rows reads
    the piece from the L2 cache. Wide heads and float8 caches take many registers, so their tiles of
    tokens are short, and only one tile is fetched ahead.
    """
    rows, fp8 = shared_rows(heads.group), heads.cache_bytes == 1
    if heads.query_bytes == 4:
        return LaunchConfig(rows, tile=16, num_warps=8, num_stages=2)
    if heads.widths > 256:
        if fp8 or rows > 64:
            return LaunchConfig(rows, tile=16, num_warps=8, num_stages=3)
        return LaunchConfig(rows, tile=32, num_warps=4, num_stages=3)
    return LaunchConfig(rows, tile=64, num_warps=4, num_stages=5)


_UNUSED = {"context_lens_ptr", "out_ptr", "out_strides", "sinks_ptr", "prompt_lens_ptr", "window"}


def attend_shared(shared: dict[str, Any], heads: Heads, work: DecodeWork, launch: int) -> None:
    """Compute the partial states of shared pieces."""
    config = shared_config(heads)
    num_programs = num_persistent(work.items.device, len(work.items) * shared["NUM_KV_HEADS"])
    _shared_kernel[(num_programs,)](
        **{name: value for name, value in shared.items() if name not in _UNUSED},
        partials=work.partials,
        max_pieces=work.max_pieces,
        order_ptr=work.order,
        decode_shared_ptr=work.decode_shared,
        items_ptr=work.items,
        counters_ptr=work.counters,
        num_counters=work.counters.shape[1],
        launch=launch,
        num_sequences=len(work.items) // work.max_pieces,
        PIECE=work.piece,
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
    place,  # index of the first sequence in the order
    end,  # end of the piece
    num_sequences,
    SEQUENCES: tl.constexpr,  # sequences per tile, at most
    ROWS: tl.constexpr,
):  # number of sequences in the tile
    # Count the sequences before the first sequence that does not share the piece with its
    # predecessor.
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
    query_strides,
    cache,  # Cache
    table_ptr,  # [S, max_blocks] int32
    table_stride,
    query_starts_ptr,  # [S + 1] int32
    order_ptr,  # [S] int32
    decode_shared_ptr,  # [S] int32
    items_ptr,  # [N, 2] int32: index in the order of a tile's first sequence, and piece
    counters_ptr,  # [2, num_counters] int32: N, then the number of items that each launch has taken
    partials,  # Partials
    score_scale,
    cap,  # or None
    max_pieces,
    num_counters,
    launch,  # index of this launch among those that use the work list
    num_sequences,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,  # sequences per tile, at most
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    key_columns = tl.arange(0, cache.KEY_BLOCK)
    # Read the number of items again for each item, to save registers.
    ticket = tl.atomic_add(counters_ptr + num_counters + 1 + launch, 1)
    while ticket < tl.load(counters_ptr + num_counters) * NUM_KV_HEADS:
        # Skip the single items, which come first in the list.
        item = (tl.load(counters_ptr) + ticket // NUM_KV_HEADS).to(tl.int64)
        kv_head = ticket % NUM_KV_HEADS  # int32, like the offsets of heads in a slot
        place = tl.load(items_ptr + 2 * item)
        piece = tl.load(items_ptr + 2 * item + 1)
        end = (piece + 1) * PIECE
        count = _sequences_of_tile(decode_shared_ptr, place, end, num_sequences, SEQUENCES, ROWS)
        row_live = rows < count * GROUP
        sequences = tl.load(order_ptr + place + rows // GROUP, mask=row_live, other=0).to(tl.int64)
        query_rows = tl.load(query_starts_ptr + sequences).to(tl.int64)
        heads = kv_head * GROUP + rows % GROUP
        query, scales = load_query(
            (query_ptr + kv_head * GROUP * query_strides[1] + key_columns * query_strides[2])[
                None, :
            ]
            + (query_rows * query_strides[0] + rows % GROUP * query_strides[1])[:, None],
            row_live[:, None] & (key_columns[None, :] < cache.KEY_WIDTH),
            score_scale,
            cache.key_ptr.dtype.element_ty,
        )
        row_max, row_sum = initial_state(None, heads, row_live, ROWS)
        # Every row sees the whole piece, in the blocks of the tile's first sequence.
        table_row = tl.load(order_ptr + place).to(tl.int64)
        row_max, row_sum, acc = attend(
            query, rows, piece * PIECE, end, row_max, row_sum,
            tl.zeros([ROWS, cache.VALUE_BLOCK], tl.float32),
            cache, kv_head, table_ptr + table_row * table_stride, scales, cap, None, TILE, False,
        )  # fmt: skip
        # Load the sequences again, as int32, to save registers. (Offsets in the workspace fit into
        # int32.) The clamping prevents Triton from reusing the earlier load.
        places = tl.minimum(place + rows // GROUP, num_sequences - 1)
        sequences = tl.load(order_ptr + places)
        at = (sequences * (NUM_KV_HEADS * GROUP) + heads) * max_pieces + piece
        store_partials(
            partials, at, row_max, row_sum, acc, row_live, cache.VALUE_WIDTH, cache.VALUE_BLOCK
        )
        ticket = tl.atomic_add(counters_ptr + num_counters + 1 + launch, 1)
