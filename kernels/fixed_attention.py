"""Paged attention whose bits depend on a query token's own context alone.

What `paged_attention` computes, and its formula. There a decode and a chunk have programs of their
own, and so other bits for the same token. Here one program, compiled once, serves all: the token
may come in a chunk of any size, as a decode, after a cached prefix or when its sequence is computed
again, beside whatever else. Its sum is made in this order:

1. positions are cut at multiples of `FIXED_PIECE` into pieces, and a piece into tiles, both counted
   from position 0, whatever the query tokens are;
2. online softmax over the tiles of a piece, from nothing; a tile of which a token sees nothing
   leaves its maximum, sum and output as they are, exactly;
3. pieces are joined from the first to the last, starting from the sinks. A program does that for
   all the pieces of its tile, or else writes down what each comes to, and `_join_kernel` does it:
   the operations are the same, and their fused multiply-adds are written out.

A prefix that sequences share is read by each of them.

Sources: fixed split sizes in place of a fixed number of splits, and one order for prefill and
decode, are from "Defeating Nondeterminism in LLM Inference" (He and Thinking Machines Lab 2025);
vLLM's `VLLM_BATCH_INVARIANT` has one split, SGLang's deterministic mode splits of a fixed size.
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
)
from batchinfer.kernels.decode_work import shared_rows
from batchinfer.kernels.fixed_work import FixedWork, fixed_pieces
from batchinfer.kernels.launch import OPTIONS, check_launchable
from batchinfer.kernels.paged_attention import check_shapes, shared_arguments
from batchinfer.kernels.residency import num_resident


def fixed_config(heads: Heads) -> LaunchConfig:
    """Launch shape: 64 rows, the least that a Hopper warp group multiplies, for every query token.

    A decode leaves most of them empty, and reading its context takes longer than multiplying. Tiles
    are as long as the registers allow.
    """
    if heads.query_bytes == 4:
        return LaunchConfig(padded(heads.group), tile=16, num_warps=8, num_stages=2)
    rows, fp8 = shared_rows(heads.group), heads.cache_bytes == 1
    if heads.widths > 384 and heads.capability >= 90 and not fp8:
        return LaunchConfig(rows, tile=16, num_warps=4, num_stages=5)
    if heads.widths > 256:
        return LaunchConfig(rows, tile=16 if fp8 else 32, num_warps=8, num_stages=5)
    if heads.capability >= 90 or heads.widths <= 128:
        return LaunchConfig(rows, tile=64, num_warps=4, num_stages=5)
    return LaunchConfig(rows, tile=32, num_warps=8 if fp8 else 4, num_stages=5)


def fixed_query_tile(heads: Heads) -> int:
    """Query tokens of a program, as `plan_fixed` takes them."""
    return fixed_config(heads).rows // heads.group


def fixed_attention(
    query: torch.Tensor,  # [T, Hq, Dk], packed over sequences
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk], any strides; or float8
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv], any strides
    block_tables: torch.Tensor,  # [S, max_blocks] int32, width contiguous
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32, tokens in the cache after this step
    *,
    scale: float,
    out: torch.Tensor,  # [T, Hq, Dv], written in place
    work: FixedWork,
    launch: int = 0,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [Hq]
) -> None:
    """Attend, and write `out`. The step's own keys and values are in the cache already.

    `work` is what `plan_fixed` made of the same lengths and window, and `launch` which of its
    launches this is. Rows of `query` past query_starts[S] are neither read nor written.
    """
    check_launchable(
        "fixed_attention", query, key_cache, value_cache, block_tables, query_starts, context_lens,
        out, sinks,
    )  # fmt: skip
    if len(context_lens) == 0 or len(query) == 0:
        return
    assert scale > 0, "the scale must be positive"
    assert work.window == sliding_window, "the work list is for another window"
    check_shapes(query, key_cache, value_cache, block_tables, out)
    shared = shared_arguments(
        query, key_cache, value_cache, block_tables, query_starts, context_lens, out, sinks,
        scale, sliding_window, softcap,
    )  # fmt: skip
    heads = Heads.of(query, key_cache, value_cache)
    config = fixed_config(heads)
    partials = {
        "partial_out_ptr": work.partial_out,
        "partial_max_ptr": work.partial_max,
        "partial_sum_ptr": work.partial_sum,
        "max_pieces": work.max_pieces,
        "PIECE": work.piece,
    }
    arguments = {
        **shared,
        **partials,
        "totals_ptr": work.partial_out,
        "items_ptr": work.items,
        "counters_ptr": work.counters,
        "launch": launch,
        "TOKENS": work.tokens,
        "TILE": min(config.tile, work.piece),
        "ROWS": config.rows,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **OPTIONS,
    }
    programs = min(
        len(work.items) * shared["NUM_KV_HEADS"], num_resident(_fixed_kernel, **arguments)
    )
    totals = work.partial_out.new_empty(programs, 2, config.rows, shared["VALUE_BLOCK"])
    _fixed_kernel[(programs,)](**arguments | {"totals_ptr": totals})
    if work.max_pieces > 1:
        _join_pieces(shared, partials, len(context_lens))


def _join_pieces(shared: dict[str, Any], partials: dict[str, Any], num_sequences: int) -> None:
    names = (
        "query_starts_ptr", "context_lens_ptr", "out_ptr", "sinks_ptr", "out_row_stride",
        "out_head_stride", "out_width_stride", "window", "GROUP", "VALUE_WIDTH", "VALUE_BLOCK",
        "WINDOWED",
    )  # fmt: skip
    _join_kernel[(num_sequences, shared["NUM_KV_HEADS"])](
        **{name: shared[name] for name in names},
        **partials,
        GROUP_BLOCK=triton.next_power_of_2(shared["GROUP"]),
        num_warps=4,
        **OPTIONS,
    )


# Both kernels join pieces by these two. Products are fused into sums as it is written, not as a
# compiler likes; and joining to nothing, or joining nothing, changes no bit.
@triton.jit
def _join_sums(
    total_max,  # [ROWS] float32: of the pieces before
    total_sum,  # [ROWS] float32
    piece_max,  # [ROWS] float32
    piece_sum,  # [ROWS] float32
):  # maximum and sum of both, and what the outputs of each are multiplied by
    new_max = tl.maximum(total_max, piece_max)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(total_max - shift)
    weight = tl.exp2(piece_max - shift)
    return new_max, tl.fma(piece_sum, weight, total_sum * decay), decay, weight


@triton.jit
def _join_outs(
    total,  # [ROWS, WIDTH] float32
    decay,  # [ROWS] float32
    piece_out,  # [ROWS, WIDTH] float32
    weight,  # [ROWS] float32
):
    return tl.fma(piece_out, tl.broadcast_to(weight[:, None], total.shape), total * decay[:, None])


@triton.jit(do_not_specialize=["table_stride", "max_pieces", "launch"])
def _fixed_kernel(
    query_ptr,  # [T, Hq, Dk]
    key_ptr,  # [num_slots, Hkv, block_size, Dk]
    value_ptr,  # [num_slots, Hkv, block_size, Dv]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    sinks_ptr,  # [Hq] or None
    items_ptr,  # [N, 2] int32: sequence; tile of query tokens, or piece of a decode
    counters_ptr,  # [1 + launches] int32: N, then taken items of each launch
    partial_out_ptr,  # [S, Hq, max_pieces, Dv] float32, not divided by the sum
    partial_max_ptr,  # [S, Hq, max_pieces] float32
    partial_sum_ptr,  # [S, Hq, max_pieces] float32
    totals_ptr,  # [programs, 2, ROWS, VALUE_BLOCK] float32: of pieces so far, of one
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
    TOKENS: tl.constexpr,  # query tokens of a tile
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    key_columns = tl.arange(0, KEY_BLOCK)
    value_columns = tl.arange(0, VALUE_BLOCK)
    num_tickets = tl.load(counters_ptr) * NUM_KV_HEADS
    counters_ptr += 1 + launch
    ticket = tl.atomic_add(counters_ptr, 1)
    while ticket < num_tickets:
        item = (ticket // NUM_KV_HEADS).to(tl.int64)
        kv_head = (ticket % NUM_KV_HEADS).to(tl.int64)
        sequence = tl.load(items_ptr + 2 * item).to(tl.int64)
        number = tl.load(items_ptr + 2 * item + 1)
        query_start = tl.load(query_starts_ptr + sequence)
        query_len = tl.load(query_starts_ptr + sequence + 1) - query_start
        computed = tl.load(context_lens_ptr + sequence) - query_len  # before this step
        first = tl.where(query_len == 1, 0, number * TOKENS)

        query_tokens = first + rows // GROUP
        row_live = (rows < TOKENS * GROUP) & (query_tokens < query_len)
        query_rows = (query_start + query_tokens).to(tl.int64)
        heads = kv_head * GROUP + rows % GROUP
        query, scales = load_query(
            query_ptr
            + (query_rows * query_row_stride + heads * query_head_stride)[:, None]
            + key_columns[None, :] * query_width_stride,
            row_live[:, None] & (key_columns[None, :] < KEY_WIDTH),
            score_scale,
            key_ptr.dtype.element_ty,
        )
        begin = tl.maximum(computed + first + 1 - window, 0) if WINDOWED else first * 0
        end = computed + tl.minimum(first + TOKENS, query_len)
        first_piece, count = fixed_pieces(begin, end, PIECE)
        is_part = (query_len == 1) & (max_pieces > 1) & (count > 1)
        low = first_piece + tl.where(is_part, number, 0)
        last = tl.where(is_part, low, first_piece + count - 1)
        # What is only a part has the sinks when it is joined. (`row_live & ~is_part` would be the
        # same, but Triton's interpreter makes integers of it.)
        holds_sinks = row_live & (rows < tl.where(is_part, 0, ROWS))
        total_max, total_sum = initial_state(sinks_ptr, heads, holds_sinks, ROWS)
        for piece in range(low, last + 1):
            piece_max, piece_sum, piece_out = attend(
                query,
                computed + query_tokens,
                tl.maximum(begin, piece * PIECE),
                tl.minimum(end, (piece + 1) * PIECE),
                tl.full([ROWS], float("-inf"), tl.float32),
                tl.zeros([ROWS], tl.float32),
                tl.zeros([ROWS, VALUE_BLOCK], tl.float32),
                key_ptr + kv_head * key_head_stride,
                value_ptr + kv_head * value_head_stride,
                table_ptr + sequence * table_stride,
                key_slot_units, key_token_units, key_width_stride,
                value_slot_units, value_token_units, value_width_stride,
                scales, cap, window,
                BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH, KEY_BLOCK, VALUE_BLOCK,
                UNIT, ROW_TYPE, SAME_ROWS, TURNED, WINDOWED, CAPPED, TILE, True,
            )  # fmt: skip
            if is_part:
                partials = (sequence * (NUM_KV_HEADS * GROUP) + heads) * max_pieces + number
                tl.store(partial_max_ptr + partials, piece_max, mask=row_live)
                tl.store(partial_sum_ptr + partials, piece_sum, mask=row_live)
                partial_ptrs = partial_out_ptr + partials[:, None] * VALUE_WIDTH
                there = row_live[:, None] & (value_columns[None, :] < VALUE_WIDTH)
                tl.store(partial_ptrs + value_columns[None, :], piece_out, mask=there)
            else:
                total_max, total_sum, decay, weight = _join_sums(
                    total_max, total_sum, piece_max, piece_sum
                )
                # Registers have no room for two such sums: they meet in memory, in parts.
                at = totals_ptr + tl.program_id(0) * (2 * ROWS * VALUE_BLOCK)
                at += rows[:, None] * VALUE_BLOCK
                piece_at = at + ROWS * VALUE_BLOCK
                tl.store(piece_at + value_columns[None, :], piece_out, mask=row_live[:, None])
                tl.debug_barrier()
                out_rows = query_rows * out_row_stride + heads * out_head_stride
                for start in range(0, VALUE_BLOCK, 16):
                    columns = (start + tl.arange(0, 16))[None, :]
                    there = row_live[:, None] & (columns < VALUE_WIDTH)
                    before = row_live[:, None] & (columns < tl.where(piece > low, VALUE_WIDTH, 0))
                    total = _join_outs(
                        tl.load(at + columns, mask=before, other=0.0),
                        decay,
                        tl.load(piece_at + columns, mask=there, other=0.0),
                        weight,
                    )
                    if piece < last:
                        tl.store(at + columns, total, mask=there)
                    else:
                        tl.store(
                            out_ptr + out_rows[:, None] + columns * out_width_stride,
                            divide(total, total_sum[:, None]),
                            mask=there,
                        )
                tl.debug_barrier()
        ticket = tl.atomic_add(counters_ptr, 1)


@triton.jit(do_not_specialize=["max_pieces"])
def _join_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    sinks_ptr,  # [Hq] or None
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
    begin = tl.maximum(context_len - window, 0) if WINDOWED else context_len * 0
    _, count = fixed_pieces(begin, context_len, PIECE)
    if count == 1:
        return

    rows = tl.arange(0, GROUP_BLOCK)
    live = rows < GROUP
    heads = kv_head * GROUP + rows
    columns = tl.arange(0, VALUE_BLOCK)
    mask = live[:, None] & (columns[None, :] < VALUE_WIDTH)
    first = (sequence * (tl.num_programs(1) * GROUP) + heads) * max_pieces
    total_max, total_sum = initial_state(sinks_ptr, heads, live, GROUP_BLOCK)
    total = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for piece in range(0, count):
        partials = first + piece
        piece_max = tl.load(partial_max_ptr + partials, mask=live, other=float("-inf"))
        piece_sum = tl.load(partial_sum_ptr + partials, mask=live, other=0.0)
        partial_ptrs = partial_out_ptr + partials[:, None] * VALUE_WIDTH + columns[None, :]
        piece_out = tl.load(partial_ptrs, mask=mask, other=0.0)
        total_max, total_sum, decay, weight = _join_sums(total_max, total_sum, piece_max, piece_sum)
        total = _join_outs(total, decay, piece_out, weight)

    out_ptrs = out_ptr + query_row * out_row_stride + heads[:, None] * out_head_stride
    result = divide(total, total_sum[:, None])
    tl.store(out_ptrs + columns[None, :] * out_width_stride, result, mask=mask)
