"""Attention of the sequences that compute one token in this step.

Programs as many as run at a time take (piece, KV head) after (piece, KV head) from the work list,
each the next one when it is done, and `_merge_kernel` joins the pieces of a context. A context of
one piece is written at once. What a row gets depends neither on who takes a piece nor on when.
Pieces that several sequences have in common are computed for all of them together, before
(`shared_attention.py`).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attend import (
    Heads,
    LaunchConfig,
    attend,
    divide,
    initial_state,
    load_query,
    padded,
    tile_tokens,
)
from batchinfer.kernels.decode_list import pieces
from batchinfer.kernels.decode_work import DecodeWork
from batchinfer.kernels.fp8_halves import MOST_HEADS, attend_halves, load_halves
from batchinfer.kernels.launch import OPTIONS
from batchinfer.kernels.residency import launch_resident
from batchinfer.kernels.shared_attention import attend_shared

_FLOAT8_WIDTH = 32
"""The least that `tl.dot` sums over of float8."""


def decode_config(heads: Heads, *, halves: bool = False) -> LaunchConfig:
    """Launch shape of one query token: the rows are a group's heads, and 16 is the least that
    `tl.dot` takes. Halves are of 4 or 8 heads, and have their rows the other way.

    A tile is 32 KB where the cache has so much in 128 tokens, of halves in 256, and two are on
    their way: what is done once a tile is paid for as many bytes, however narrow the heads or the
    cache are. Four warps leave registers for three such programs at a time.
    """
    tile = tile_tokens(heads, most=256 if halves else 128)
    rows = (4 if heads.group <= 4 else MOST_HEADS) if halves else padded(heads.group)
    return LaunchConfig(rows, tile=tile, num_warps=4, num_stages=5)


def multiplies_halves(query: torch.dtype, heads: Heads, *, turned: bool) -> bool:
    """Whether products are of float8: a group's halves fit, and warp groups multiply float8."""
    lies_so = heads.cache_bytes == 1 and turned and heads.group <= MOST_HEADS
    return lies_so and query == torch.bfloat16 and heads.capability == 90


def attend_decodes(shared: dict[str, Any], heads: Heads, work: DecodeWork, launch: int) -> None:
    """Attend in pieces, and merge them.

    Args:
        shared: the arguments of both kinds of programs.
        launch: which of the launches that the work list is for.
    """
    group, num_kv_heads = shared["GROUP"], shared["NUM_KV_HEADS"]
    halves = multiplies_halves(shared["query_ptr"].dtype, heads, turned=shared["TURNED"])
    config = decode_config(heads, halves=halves)
    partials = {
        "partial_out_ptr": work.partial_out,
        "partial_max_ptr": work.partial_max,
        "partial_sum_ptr": work.partial_sum,
        "max_pieces": work.max_pieces,
        "PIECE": work.piece,
    }
    if work.order is not None:
        attend_shared(shared, partials, heads, work, launch)
    key_block = max(_FLOAT8_WIDTH, shared["KEY_BLOCK"]) if halves else shared["KEY_BLOCK"]
    launch_resident(
        _decode_kernel,
        len(work.items) * num_kv_heads,
        **shared | {"KEY_BLOCK": key_block},
        **partials,
        items_ptr=work.items,
        counters_ptr=work.counters,
        launch=launch,
        TILE=min(config.tile, work.piece),
        ROWS=config.rows,
        HALVES=halves,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )
    if work.max_pieces > 1:
        names = (
            "query_starts_ptr", "context_lens_ptr", "out_ptr", "out_row_stride", "out_head_stride",
            "out_width_stride", "window", "GROUP", "VALUE_WIDTH", "VALUE_BLOCK", "WINDOWED",
        )  # fmt: skip
        _merge_kernel[(len(work.items) // work.max_pieces, num_kv_heads)](
            **{name: shared[name] for name in names},
            **partials,
            GROUP_BLOCK=triton.next_power_of_2(group),
            num_warps=4,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=["table_stride", "max_pieces", "launch"])
def _decode_kernel(
    query_ptr,  # [T, Hq, Dk]
    key_ptr,  # [num_slots, Hkv, block_size, Dk]
    value_ptr,  # [num_slots, Hkv, block_size, Dv]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    sinks_ptr,  # [Hq] or None
    items_ptr,  # [N, 2] int32: sequence, piece
    counters_ptr,  # [1 + launches] int32: N, then taken items of each launch
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
    out_row_stride,
    out_head_stride,
    out_width_stride,
    table_stride,
    score_scale,
    cap,
    window,
    max_pieces,
    launch,  # of those that share the work list
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
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HALVES: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    row_live = rows < GROUP
    key_columns = tl.arange(0, KEY_BLOCK)
    value_columns = tl.arange(0, VALUE_BLOCK)
    value_mask = row_live[:, None] & (value_columns[None, :] < VALUE_WIDTH)
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
        begin, first, length, count = pieces(context_len, window, max_pieces, WINDOWED, PIECE)
        begin = tl.maximum(begin, first + piece * length)
        end = tl.minimum(context_len, first + (piece + 1) * length)
        heads = kv_head * GROUP + rows
        query_ptrs = query_ptr + query_row * query_row_stride + heads[:, None] * query_head_stride
        query_ptrs += key_columns[None, :] * query_width_stride
        query_mask = row_live[:, None] & (key_columns[None, :] < KEY_WIDTH)
        # The sinks count once: the first piece has them. (`row_live & (piece == 0)` would be the
        # same, but Triton's interpreter makes integers of it.)
        holds_sinks = rows < tl.where(piece == 0, GROUP, 0)
        row_max, row_sum = initial_state(sinks_ptr, heads, holds_sinks, ROWS)
        keys, values = key_ptr + kv_head * key_head_stride, value_ptr + kv_head * value_head_stride
        table = table_ptr + sequence * table_stride
        if HALVES:
            query, scales = load_halves(
                query_ptrs, query_mask, score_scale, key_ptr.dtype.element_ty
            )
            row_max, row_sum, acc = attend_halves(
                query, begin, end, row_max, row_sum, keys, values, table,
                key_slot_units, key_token_units, key_width_stride,
                value_slot_units,
                scales, cap,
                BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
                UNIT, ROW_TYPE, WINDOWED, CAPPED, TILE,
            )  # fmt: skip
            acc = tl.trans(acc)
        else:
            query, scales = load_query(
                query_ptrs, query_mask, score_scale, key_ptr.dtype.element_ty
            )
            row_max, row_sum, acc = attend(
                query,
                tl.zeros([ROWS], tl.int32) + context_len - 1,
                begin, end, row_max, row_sum,
                tl.zeros([ROWS, VALUE_BLOCK], tl.float32),
                keys, values, table,
                key_slot_units, key_token_units, key_width_stride,
                value_slot_units, value_token_units, value_width_stride,
                scales, cap, window,
                BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
                UNIT, ROW_TYPE, SAME_ROWS, TURNED, WINDOWED, CAPPED, TILE, True,
            )  # fmt: skip
        if count == 1:
            out_ptrs = out_ptr + query_row * out_row_stride + heads[:, None] * out_head_stride
            tl.store(
                out_ptrs + value_columns[None, :] * out_width_stride,
                divide(acc, row_sum[:, None]),
                mask=value_mask,
            )
        else:
            partials = (sequence * (NUM_KV_HEADS * GROUP) + heads) * max_pieces + piece
            tl.store(partial_max_ptr + partials, row_max, mask=row_live)
            tl.store(partial_sum_ptr + partials, row_sum, mask=row_live)
            partial_ptrs = partial_out_ptr + partials[:, None] * VALUE_WIDTH
            tl.store(partial_ptrs + value_columns[None, :], acc, mask=value_mask)
        ticket = tl.atomic_add(counters_ptr, 1)


@triton.jit(do_not_specialize=["max_pieces"])
def _merge_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    partial_out_ptr,  # [S, Hq, max_pieces, Dv] float32
    partial_max_ptr,  # [S, Hq, max_pieces] float32
    partial_sum_ptr,  # [S, Hq, max_pieces] float32
    out_row_stride,
    out_head_stride,
    out_width_stride,
    window,
    max_pieces,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_BLOCK: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    query_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
    if tl.load(query_starts_ptr + sequence + 1) - query_row != 1:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    _, _, _, count = pieces(context_len, window, max_pieces, WINDOWED, PIECE)
    if count == 1:
        return

    rows = tl.arange(0, GROUP_BLOCK)
    live = rows < GROUP
    heads = kv_head * GROUP + rows
    columns = tl.arange(0, VALUE_BLOCK)
    mask = live[:, None] & (columns[None, :] < VALUE_WIDTH)
    first = (sequence * (tl.num_programs(1) * GROUP) + heads) * max_pieces
    total_max = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total_sum = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for piece in range(0, count):
        partials = first + piece
        piece_max = tl.load(partial_max_ptr + partials, mask=live, other=float("-inf"))
        piece_sum = tl.load(partial_sum_ptr + partials, mask=live, other=0.0)
        partial_ptrs = partial_out_ptr + partials[:, None] * VALUE_WIDTH + columns[None, :]
        piece_out = tl.load(partial_ptrs, mask=mask, other=0.0)
        new_max = tl.maximum(total_max, piece_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(total_max - shift)
        weight = tl.exp2(piece_max - shift)
        total_sum = total_sum * decay + piece_sum * weight
        acc = acc * decay[:, None] + piece_out * weight[:, None]
        total_max = new_max

    out_ptrs = out_ptr + query_row * out_row_stride + heads[:, None] * out_head_stride
    result = divide(acc, total_sum[:, None])
    tl.store(out_ptrs + columns[None, :] * out_width_stride, result, mask=mask)
