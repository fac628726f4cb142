"""Paged attention whose bits depend on a query token's own context alone.

It computes the formula of `paged_attention`. There decodes and chunks have programs of their own,
and so different bits for the same token. Here one program, compiled once, serves all: a token may
come in a chunk of any size, as a decode, after a cached prefix or when its sequence is computed
again, beside any other sequences. Its sum is made in this order:

1. positions are cut at multiples of `FIXED_PIECE` into pieces, and a piece into tiles, both counted
   from position 0, whatever the query tokens are;
2. online softmax over the tiles of a piece, from nothing; a tile of which a token sees nothing
   leaves its maximum, sum and output as they are, exactly;
3. pieces are joined from the first to the last, starting from the sinks. A program does that for
   all the pieces of its tile, or stores their states, and `merge_partials` does it with the same
   operations, whose fused multiply-adds are written out.

A prefix that sequences share is read by each of them.

Sources: fixed split sizes in place of a fixed number of splits, and one order for prefill and
decode, are from "Defeating Nondeterminism in LLM Inference" (He and Thinking Machines Lab 2025);
vLLM's `VLLM_BATCH_INVARIANT` has one split, SGLang's deterministic mode splits of a fixed size.
"""

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
from batchinfer.kernels.fixed_work import FixedWork
from batchinfer.kernels.launch import OPTIONS, check_launchable, num_persistent
from batchinfer.kernels.paged_attention import shared_arguments
from batchinfer.kernels.pieces import (
    fixed_pieces,
    join_outs,
    join_sums,
    merge_partials,
    store_partials,
)


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

    Rows of `query` past query_starts[S] are neither read nor written.

    Args:
        work: from `plan_fixed` for the same lengths and window.
        launch: which of the launches of `work` this is.
    """
    check_launchable(
        "fixed_attention", query, key_cache, value_cache, block_tables, query_starts, context_lens,
        out, sinks,
    )  # fmt: skip
    if len(context_lens) == 0 or len(query) == 0:
        return
    assert work.window == sliding_window, "the work list is for another window"
    shared = shared_arguments(
        query, key_cache, value_cache, block_tables, query_starts, context_lens, out, sinks,
        scale, sliding_window, softcap,
    )  # fmt: skip
    num_kv_heads = key_cache.shape[1]
    config = fixed_config(Heads.of(query, key_cache, value_cache))
    num_programs = num_persistent(query.device, len(work.items) * num_kv_heads)
    value_block = padded(value_cache.shape[3])
    totals = work.partials.out_ptr.new_empty(num_programs, 2, config.rows, value_block)
    _fixed_kernel[(num_programs,)](
        **shared,
        partials=work.partials,
        max_pieces=work.max_pieces,
        totals_ptr=totals,
        items_ptr=work.items,
        counters_ptr=work.counters,
        launch=launch,
        PIECE=work.piece,
        TOKENS=work.tokens,
        TILE=min(config.tile, work.piece),
        ROWS=config.rows,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **OPTIONS,
    )
    if work.max_pieces > 1:
        merge_partials(
            work.partials,
            query_starts=query_starts,
            context_lens=context_lens,
            out=out,
            sinks=sinks,
            window=shared["window"],
            max_pieces=work.max_pieces,
            piece=work.piece,
            head_groups=num_kv_heads,
            fixed=True,
        )


@triton.jit(do_not_specialize=["table_stride", "max_pieces", "launch"])
def _fixed_kernel(
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
    items_ptr,  # [N, 2] int32: sequence; tile of query tokens, or piece of a decode
    counters_ptr,  # [1 + launches] int32: N, then taken items of each launch
    partials,  # Partials
    totals_ptr,  # [programs, 2, ROWS, VALUE_BLOCK] float32: of pieces so far, of one
    score_scale,
    cap,  # or None
    window,  # or None
    max_pieces,
    launch,  # of those that share the work list
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of a tile
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    key_columns = tl.arange(0, cache.KEY_BLOCK)
    value_columns = tl.arange(0, cache.VALUE_BLOCK)
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
            + (query_rows * query_strides[0] + heads * query_strides[1])[:, None]
            + key_columns[None, :] * query_strides[2],
            row_live[:, None] & (key_columns[None, :] < cache.KEY_WIDTH),
            score_scale,
            cache.key_ptr.dtype.element_ty,
        )
        begin = first * 0 if window is None else tl.maximum(computed + first + 1 - window, 0)
        end = computed + tl.minimum(first + TOKENS, query_len)
        first_piece, count = fixed_pieces(begin, end, PIECE)
        is_part = (query_len == 1) & (max_pieces > 1) & (count > 1)
        low = first_piece + tl.where(is_part, number, 0)
        last = tl.where(is_part, low, first_piece + count - 1)
        # Of several parts none has the sinks: the merge starts from them. (`row_live & ~is_part`
        # would be the same, but Triton's interpreter makes integers of it.)
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
                tl.zeros([ROWS, cache.VALUE_BLOCK], tl.float32),
                cache, kv_head, table_ptr + sequence * table_stride,
                scales, cap, window, TILE, True,
            )  # fmt: skip
            if is_part:
                part = (sequence * (NUM_KV_HEADS * GROUP) + heads) * max_pieces + number
                store_partials(
                    partials, part, piece_max, piece_sum, piece_out, row_live,
                    cache.VALUE_WIDTH, cache.VALUE_BLOCK,
                )  # fmt: skip
            else:
                total_max, total_sum, decay, weight = join_sums(
                    total_max, total_sum, piece_max, piece_sum
                )
                # Registers have no room for two such sums: they meet in memory, in parts.
                at = totals_ptr + tl.program_id(0) * (2 * ROWS * cache.VALUE_BLOCK)
                at += rows[:, None] * cache.VALUE_BLOCK
                piece_at = at + ROWS * cache.VALUE_BLOCK
                tl.store(piece_at + value_columns[None, :], piece_out, mask=row_live[:, None])
                tl.debug_barrier()
                out_rows = query_rows * out_strides[0] + heads * out_strides[1]
                for start in range(0, cache.VALUE_BLOCK, 16):
                    columns = (start + tl.arange(0, 16))[None, :]
                    there = row_live[:, None] & (columns < cache.VALUE_WIDTH)
                    before = row_live[:, None] & (
                        columns < tl.where(piece > low, cache.VALUE_WIDTH, 0)
                    )
                    total = join_outs(
                        tl.load(at + columns, mask=before, other=0.0),
                        decay,
                        tl.load(piece_at + columns, mask=there, other=0.0),
                        weight,
                    )
                    if piece < last:
                        tl.store(at + columns, total, mask=there)
                    else:
                        tl.store(
                            out_ptr + out_rows[:, None] + columns * out_strides[2],
                            divide(total, total_sum[:, None]),
                            mask=there,
                        )
                tl.debug_barrier()
        ticket = tl.atomic_add(counters_ptr, 1)
