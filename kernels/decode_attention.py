"""Attention for decodes: sequences that compute one token in this step.

Each program repeatedly takes a piece of a context and a KV head from the work list.
`merge_partials` merges the results of a context's pieces; if a context has only one piece, the
result is written directly. Results do not depend on which program computes a piece, or on the order
of pieces. `shared_attention.py` first computes the pieces that several sequences share.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import (
    Heads,
    LaunchConfig,
    attend,
    divide,
    initial_state,
    load_query,
    padded,
    tile_tokens,
)
from batchinfer.kernels.decode_plan import DecodeWork
from batchinfer.kernels.fp8_decode_attention import MAX_HEADS, attend_split, load_split
from batchinfer.kernels.launch import OPTIONS, num_persistent
from batchinfer.kernels.shared_attention import attend_shared
from batchinfer.kernels.split_kv import merge_partials, pieces, store_partials

_FLOAT8_WIDTH = 32
"""The smallest K dimension of a float8 `tl.dot`."""


def decode_config(heads: Heads, *, split: bool = False) -> LaunchConfig:
    """Return the launch shape for one query token.

    Rows are the heads of a group, padded to at least 16 for `tl.dot`. With split queries (float8
    GEMMs), the heads of a group, padded to 4 or 8, are columns of the GEMMs. A tile has 128 tokens
    (256 for split queries) or 32 KB, whichever is less, so that narrow heads and narrow dtypes have
    longer tiles. While a tile is computed, the next two tiles are loaded. With four warps, the
    registers of a multiprocessor hold three such programs.
    """
    tile = tile_tokens(heads, most=256 if split else 128)
    rows = (4 if heads.group <= 4 else MAX_HEADS) if split else padded(heads.group)
    return LaunchConfig(rows, tile=tile, num_warps=4, num_stages=5)


def multiplies_float8(query: torch.dtype, heads: Heads, *, transposed: bool) -> bool:
    """Return true if decodes use float8 GEMMs: if the device's warp groups support float8, and the
    heads of a group fit into one GEMM."""
    fits = heads.cache_bytes == 1 and transposed and heads.group <= MAX_HEADS
    return fits and query == torch.bfloat16 and heads.capability == 90


def attend_decodes(
    shared: dict[str, Any], heads: Heads, work: DecodeWork, launch: int, *, transposed: bool
) -> None:
    """Compute attention for all decodes piece by piece, then merge the pieces.

    Args:
        transposed: true if blocks store values transposed (`is_transposed`).
    """
    num_kv_heads = shared["NUM_KV_HEADS"]
    # If the window does not hide the prompt, masks must hide the positions between prompt and
    # window.
    hides_middle = shared["prompt_lens_ptr"] is not None
    split = multiplies_float8(shared["query_ptr"].dtype, heads, transposed=transposed)
    split = split and not hides_middle
    config = decode_config(heads, split=split)
    if work.order is not None:
        attend_shared(shared, heads, work, launch)
    cache = shared["cache"]
    if split:
        key_block = max(_FLOAT8_WIDTH, cache.KEY_BLOCK.value)
        cache = cache._replace(KEY_BLOCK=tl.constexpr(key_block))
    num_programs = num_persistent(work.items.device, len(work.items) * num_kv_heads)
    _decode_kernel[(num_programs,)](
        **shared | {"cache": cache},
        partials=work.partials,
        max_pieces=work.max_pieces,
        items_ptr=work.items,
        counters_ptr=work.counters,
        launch=launch,
        PIECE=work.piece,
        TILE=min(config.tile, work.piece),
        ROWS=config.rows,
        SPLIT=split,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )
    if work.max_pieces > 1:
        merge_partials(
            work.partials,
            query_starts=shared["query_starts_ptr"],
            context_lens=shared["context_lens_ptr"],
            out=shared["out_ptr"],
            sinks=shared["sinks_ptr"],
            window=None if hides_middle else shared["window"],
            max_pieces=work.max_pieces,
            piece=work.piece,
            head_groups=num_kv_heads,
        )


@triton.jit(do_not_specialize=["table_stride", "max_pieces", "launch"])
def _decode_kernel(
    query_ptr,  # [T, Hq, Dk]
    query_strides,
    cache,  # Cache
    table_ptr,  # [S, max_blocks] int32
    table_stride,
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    out_strides,
    sinks_ptr,  # [Hq] or None
    prompt_lens_ptr,  # [S] int32 or None
    items_ptr,  # [N, 2] int32: sequence, piece
    counters_ptr,  # [1 + launches] int32: N, then the number of items that each launch has taken
    partials,  # Partials
    score_scale,
    cap,  # or None
    window,  # or None
    max_pieces,
    launch,  # index of this launch among those that use the work list
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    row_live = rows < GROUP
    key_columns = tl.arange(0, cache.KEY_BLOCK)
    num_tickets = tl.load(counters_ptr) * NUM_KV_HEADS
    counters_ptr += 1 + launch
    ticket = tl.atomic_add(counters_ptr, 1)
    while ticket < num_tickets:
        item = (ticket // NUM_KV_HEADS).to(tl.int64)
        kv_head = (ticket % NUM_KV_HEADS).to(tl.int64)
        sequence = tl.load(items_ptr + 2 * item).to(tl.int64)
        piece = tl.load(items_ptr + 2 * item + 1)
        query_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
        context_len = tl.load(context_lens_ptr + sequence)
        prompt_len = None
        if prompt_lens_ptr is None:
            begin, first, length, count = pieces(context_len, window, max_pieces, PIECE)
        else:
            begin, first, length, count = pieces(context_len, None, max_pieces, PIECE)
            prompt_len = tl.load(prompt_lens_ptr + sequence)
        begin = tl.maximum(begin, first + piece * length)
        end = tl.minimum(context_len, first + (piece + 1) * length)
        heads = kv_head * GROUP + rows
        query_ptrs = query_ptr + query_row * query_strides[0] + heads[:, None] * query_strides[1]
        query_ptrs += key_columns[None, :] * query_strides[2]
        query_mask = row_live[:, None] & (key_columns[None, :] < cache.KEY_WIDTH)
        # If there are several pieces, `merge_partials` adds the sinks instead. (Triton's
        # interpreter would turn the simpler `row_live & (count == 1)` into integers.)
        holds_sinks = rows < tl.where(count == 1, GROUP, 0)
        row_max, row_sum = initial_state(sinks_ptr, heads, holds_sinks, ROWS)
        table = table_ptr + sequence * table_stride
        cache_type: tl.constexpr = cache.key_ptr.dtype.element_ty
        if SPLIT:
            query, scales = load_split(query_ptrs, query_mask, score_scale, cache_type)
            row_max, row_sum, acc = attend_split(
                query, begin, end, row_max, row_sum,
                cache, kv_head, table, scales, cap, window is not None, TILE,
            )  # fmt: skip
            acc = tl.trans(acc)
        else:
            query, scales = load_query(query_ptrs, query_mask, score_scale, cache_type)
            row_max, row_sum, acc = attend(
                query,
                tl.zeros([ROWS], tl.int32) + context_len - 1,
                begin, end, row_max, row_sum,
                tl.zeros([ROWS, cache.VALUE_BLOCK], tl.float32),
                cache, kv_head, table, scales, cap, window, TILE, True, None, prompt_len,
            )  # fmt: skip
        if count == 1:
            columns = tl.arange(0, cache.VALUE_BLOCK)[None, :]
            out_ptrs = out_ptr + query_row * out_strides[0] + heads[:, None] * out_strides[1]
            tl.store(
                out_ptrs + columns * out_strides[2],
                divide(acc, row_sum[:, None]),
                mask=row_live[:, None] & (columns < cache.VALUE_WIDTH),
            )
        else:
            at = (sequence * (NUM_KV_HEADS * GROUP) + heads) * max_pieces + piece
            store_partials(
                partials, at, row_max, row_sum, acc, row_live, cache.VALUE_WIDTH, cache.VALUE_BLOCK
            )
        ticket = tl.atomic_add(counters_ptr, 1)
