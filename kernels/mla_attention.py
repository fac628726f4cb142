"""Multi-head latent attention (MLA) with absorbed projections: one latent per token for all heads.

The formula is the same as in `paged_attention`, with one KV head whose values are the first
elements of its keys. A tile of the cache is therefore loaded once and multiplied twice. A key has
rank + rotary elements, 512 + 64 in DeepSeek's models. The two parts are multiplied separately,
because 576 would be padded to 1024.

The query heads of a token are cut into groups, each as large as the registers allow. A program has
one row for each head of a group and each of the program's query tokens. Each group's program reads
the context again, usually from the L2 cache, because programs for the same piece run at the same
time. The work lists are the same as for `paged_attention`, with groups of query heads instead of KV
heads.

Sources: DeepSeek-V2 (2024, arXiv:2405.04434, section 2.1). FlashMLA (DeepSeek 2025) also keeps a
latent in shared memory for both GEMMs.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import LOG2E, LaunchConfig, divide, padded
from batchinfer.kernels.chunk_attention import ChunkWork
from batchinfer.kernels.decode_plan import DecodeWork
from batchinfer.kernels.launch import (
    OPTIONS,
    check_launchable,
    compute_capability,
    num_persistent,
)
from batchinfer.kernels.split_kv import merge_partials, pieces

_MOST_HEADS = 32  # query heads per program: registers cannot hold the outputs of more heads
_MERGED_HEADS = 16  # query heads per program that merges pieces, at most


def head_tile(num_heads: int, most: int = _MOST_HEADS) -> int:
    """Return the number of query heads per program: the largest divisor of `num_heads` that is at
    most `most`."""
    return max(count for count in range(1, most + 1) if num_heads % count == 0)


def mla_config(query: torch.Tensor) -> LaunchConfig:
    rows = padded(head_tile(query.shape[1]))
    if query.element_size() == 4:
        return LaunchConfig(rows, tile=16, num_warps=8, num_stages=1)
    tile = 64 if compute_capability(query.device) >= 90 else 32
    return LaunchConfig(max(rows, 32), tile, num_warps=8, num_stages=3)


def mla_query_tile(query: torch.Tensor) -> int:
    return mla_config(query).rows // head_tile(query.shape[1])


def mla_attention(
    query: torch.Tensor,  # [T, Hq, R + P], packed over sequences: latent part, rotary part
    cache: torch.Tensor,  # [num_slots, 1, block_size, R + P], last dimension contiguous
    block_tables: torch.Tensor,  # [S, max_blocks] int32, width contiguous
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32, tokens in the cache after this step
    *,
    scale: float,
    out: torch.Tensor,  # [T, Hq, R], written in place
    work: DecodeWork | None,
    launch: int = 0,
    chunks: ChunkWork | None,
) -> None:
    """Compute attention into `out`. The cache must already hold this step's latents.

    Rows of `query` and `out` from query_starts[S] onward are neither read nor written.

    Args:
        work: from `plan_decode` for the same lengths and any number of KV heads; None if the step
            has no decodes.
        launch: index of this launch among those that use `work`.
        chunks: from `plan_chunks` with `mla_query_tile`; None if the step has no chunks.
    """
    check_launchable("mla_attention", query, cache, block_tables, query_starts, context_lens, out)
    if len(context_lens) == 0 or len(query) == 0:
        return
    num_heads, width = query.shape[1:]
    rank = out.shape[2]
    assert scale > 0, "the scale must be positive"
    assert cache.shape[1] == 1, "the cache must have one latent for all heads"
    assert cache.shape[3] == width, "query and latents differ in width"
    assert cache.dtype == query.dtype, "query and latents differ in dtype"
    assert cache.stride(3) == query.stride(2) == out.stride(2) == 1, "rows must be contiguous"
    assert padded(rank // 2) == rank // 2, "the rank must be a power of two and at least 32"
    config, group = mla_config(query), head_tile(num_heads)
    unit = math.gcd(cache.stride(0), cache.stride(2))
    arguments: dict[str, Any] = {
        "query_ptr": query,
        "cache_ptr": cache,
        "table_ptr": block_tables,
        "query_starts_ptr": query_starts,
        "context_lens_ptr": context_lens,
        "out_ptr": out,
        "query_row_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "out_row_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "slot_units": cache.stride(0) // unit,
        "token_units": cache.stride(2) // unit,
        "table_stride": block_tables.stride(0),
        "score_scale": scale * LOG2E,
        "NUM_TILES": num_heads // group,
        "GROUP": group,
        "BLOCK_SIZE": cache.shape[2],
        "RANK": rank,
        "ROTARY": width - rank,
        "ROTARY_BLOCK": padded(width - rank),
        "UNIT": unit,
        "ROWS": config.rows,
        "TILE": config.tile,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **OPTIONS,
    }
    if work is not None:
        num_programs = num_persistent(query.device, len(work.items) * arguments["NUM_TILES"])
        _mla_decode_kernel[(num_programs,)](
            **arguments,
            partials=work.partials,
            max_pieces=work.max_pieces,
            items_ptr=work.items,
            counters_ptr=work.counters,
            launch=launch,
            PIECE=work.piece,
        )
        if work.max_pieces > 1:
            merge_partials(
                work.partials,
                query_starts=query_starts,
                context_lens=context_lens,
                out=out,
                sinks=None,
                window=None,
                max_pieces=work.max_pieces,
                piece=work.piece,
                head_groups=num_heads // head_tile(num_heads, _MERGED_HEADS),
            )
    if chunks is not None:
        _mla_chunk_kernel[(len(chunks.items), num_heads // group)](
            **arguments,
            items_ptr=chunks.items,
            num_items_ptr=chunks.num_items,
            TOKENS=chunks.tokens,
        )


@triton.jit
def _load_queries(
    query_ptr,  # the first row's first element
    places,  # [ROWS] int32: offset of each row's first element
    live,  # [ROWS] bool
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
):  # the halves of the latent part [ROWS, RANK / 2], and the rotary part [ROWS, ROTARY_BLOCK]
    columns, rotary = tl.arange(0, RANK // 2), tl.arange(0, ROTARY_BLOCK)
    latent_ptrs = query_ptr + (places[:, None] + columns[None, :])
    low = tl.load(latent_ptrs, mask=live[:, None], other=0.0)
    high = tl.load(latent_ptrs + RANK // 2, mask=live[:, None], other=0.0)
    rotated = tl.load(
        query_ptr + RANK + (places[:, None] + rotary[None, :]),
        mask=live[:, None] & (rotary[None, :] < ROTARY),
        other=0.0,
    )
    return low, high, rotated


@triton.jit
def _attend_latents(
    query_low,  # [ROWS, RANK / 2]
    query_high,  # [ROWS, RANK / 2]
    query_rotated,  # [ROWS, ROTARY_BLOCK]
    positions,  # [ROWS] int32: position of each row's token
    begin,  # first position to read, a multiple of TILE
    end,  # one past the last position to read
    cache_ptr,  # [num_slots, block_size, RANK + ROTARY]
    table_ptr,  # [max_blocks] int32: the sequence's block table
    slot_units,
    token_units,
    score_scale,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,  # in elements; divides the offsets of all tokens
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # maximum and sum [ROWS] float32, and the output's halves [ROWS, RANK / 2] float32 before the
    # division by the sum. Two halves fit into registers until the end; one whole output would not.
    places = tl.arange(0, TILE)
    columns, rotary = tl.arange(0, RANK // 2), tl.arange(0, ROTARY_BLOCK)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, RANK // 2], tl.float32)
    acc_high = tl.zeros([ROWS, RANK // 2], tl.float32)
    for tile in range(begin, end, TILE):
        tokens = tile + places
        # Clamp block numbers here, and mask scores below. Load latents outside the range as 0. A
        # weight of 0 is not enough, because a reused slot may hold NaN, and 0 * NaN is NaN.
        blocks = tl.minimum(tokens, end - 1) // BLOCK_SIZE
        slots = tl.load(table_ptr + blocks).to(tl.int64)
        rows = (slots * slot_units + tokens % BLOCK_SIZE * token_units) * UNIT
        live = tokens[:, None] < end
        ptrs = cache_ptr + rows[:, None] + columns[None, :]
        low = tl.load(ptrs, mask=live, other=0.0)
        high = tl.load(ptrs + RANK // 2, mask=live, other=0.0)
        rotated = tl.load(
            cache_ptr + rows[:, None] + RANK + rotary[None, :],
            mask=live & (rotary[None, :] < ROTARY),
            other=0.0,
        )
        scores = tl.dot(query_rotated, tl.trans(rotated), input_precision="ieee")
        scores = tl.dot(query_low, tl.trans(low), scores, input_precision="ieee")
        scores = tl.dot(query_high, tl.trans(high), scores, input_precision="ieee")
        visible = tokens[None, :] <= positions[:, None]
        scores = tl.where(visible, scores * score_scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # Avoid computing -inf - -inf, which is NaN, for rows that have seen no token yet.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        weights = weights.to(low.dtype)
        acc_low = tl.dot(weights, low, acc_low * decay[:, None], input_precision="ieee")
        acc_high = tl.dot(weights, high, acc_high * decay[:, None], input_precision="ieee")
    return row_max, row_sum, acc_low, acc_high


@triton.jit
def _store_halves(
    ptr,  # the first row's first element
    places,  # [ROWS] int32: offset of each row's first element
    low,  # [ROWS, RANK / 2]
    high,  # [ROWS, RANK / 2]
    live,  # [ROWS] bool
    RANK: tl.constexpr,
):
    ptrs = ptr + (places[:, None] + tl.arange(0, RANK // 2)[None, :])
    tl.store(ptrs, low, mask=live[:, None])
    tl.store(ptrs + RANK // 2, high, mask=live[:, None])


@triton.jit(do_not_specialize=["table_stride", "max_pieces", "launch"])
def _mla_decode_kernel(
    query_ptr,  # [T, Hq, RANK + ROTARY]
    cache_ptr,  # [num_slots, 1, block_size, RANK + ROTARY]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, RANK]
    items_ptr,  # [N, 2] int32: sequence, piece
    counters_ptr,  # [1 + launches] int32: N, then the number of items that each launch has taken
    partials,  # Partials
    query_row_stride,
    query_head_stride,
    out_row_stride,
    out_head_stride,
    slot_units,
    token_units,
    table_stride,
    score_scale,
    max_pieces,
    launch,  # index of this launch among those that use the work list
    NUM_TILES: tl.constexpr,  # tiles of query heads
    GROUP: tl.constexpr,  # query heads per tile
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    live = rows < GROUP
    num_tickets = tl.load(counters_ptr) * NUM_TILES
    counters_ptr += 1 + launch
    ticket = tl.atomic_add(counters_ptr, 1)
    while ticket < num_tickets:
        # Tiles of heads that read the same piece have consecutive tickets.
        item = (ticket // NUM_TILES).to(tl.int64)
        first_head = ((ticket % NUM_TILES) * GROUP).to(tl.int64)
        sequence = tl.load(items_ptr + 2 * item).to(tl.int64)
        piece = tl.load(items_ptr + 2 * item + 1)
        query_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
        context_len = tl.load(context_lens_ptr + sequence)
        _, first, length, count = pieces(context_len, None, max_pieces, PIECE)
        # Offsets of rows and columns are int32, to leave more registers for the outputs.
        query_low, query_high, query_rotated = _load_queries(
            query_ptr + query_row * query_row_stride + first_head * query_head_stride,
            rows * query_head_stride,
            live,
            RANK, ROTARY, ROTARY_BLOCK,
        )  # fmt: skip
        row_max, row_sum, low, high = _attend_latents(
            query_low,
            query_high,
            query_rotated,
            tl.zeros([ROWS], tl.int32) + context_len - 1,
            first + piece * length,
            tl.minimum(context_len, first + (piece + 1) * length),
            cache_ptr,
            table_ptr + sequence * table_stride,
            slot_units, token_units, score_scale,
            BLOCK_SIZE, RANK, ROTARY, ROTARY_BLOCK, UNIT, ROWS, TILE,
        )  # fmt: skip
        if count == 1:
            low, high = divide(low, row_sum[:, None]), divide(high, row_sum[:, None])
            out_at = out_ptr + query_row * out_row_stride + first_head * out_head_stride
            _store_halves(out_at, rows * out_head_stride, low, high, live, RANK)
        else:
            partial = (sequence * (NUM_TILES * GROUP) + first_head) * max_pieces + piece
            tl.store(partials.max_ptr + partial + rows * max_pieces, row_max, mask=live)
            tl.store(partials.sum_ptr + partial + rows * max_pieces, row_sum, mask=live)
            partial_at = partials.out_ptr + partial * RANK
            _store_halves(partial_at, rows * (max_pieces * RANK), low, high, live, RANK)
        ticket = tl.atomic_add(counters_ptr, 1)


@triton.jit(do_not_specialize=["table_stride"])
def _mla_chunk_kernel(
    query_ptr,  # [T, Hq, RANK + ROTARY]
    cache_ptr,  # [num_slots, 1, block_size, RANK + ROTARY]
    table_ptr,  # [S, max_blocks] int32
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, RANK]
    items_ptr,  # [N, 2] int32: sequence, and the tile's first query token within it
    num_items_ptr,  # [1] int32
    query_row_stride,
    query_head_stride,
    out_row_stride,
    out_head_stride,
    slot_units,
    token_units,
    table_stride,
    score_scale,
    NUM_TILES: tl.constexpr,  # tiles of query heads
    GROUP: tl.constexpr,  # query heads per tile
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens per tile
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    if tl.program_id(0) >= tl.load(num_items_ptr):
        return
    sequence = tl.load(items_ptr + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(items_ptr + 2 * tl.program_id(0) + 1)
    query_start = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - query_start
    # The number of tokens that earlier steps computed.
    computed = tl.load(context_lens_ptr + sequence) - query_len
    rows = tl.arange(0, ROWS)
    live = (rows < TOKENS * GROUP) & (first + rows // GROUP < query_len)
    first_row = (query_start + first).to(tl.int64)
    first_head = (tl.program_id(1) * GROUP).to(tl.int64)
    query_low, query_high, query_rotated = _load_queries(
        query_ptr + first_row * query_row_stride + first_head * query_head_stride,
        rows // GROUP * query_row_stride + rows % GROUP * query_head_stride,
        live,
        RANK, ROTARY, ROTARY_BLOCK,
    )  # fmt: skip
    _, row_sum, low, high = _attend_latents(
        query_low,
        query_high,
        query_rotated,
        computed + first + rows // GROUP,
        first * 0,
        computed + tl.minimum(first + TOKENS, query_len),
        cache_ptr,
        table_ptr + sequence * table_stride,
        slot_units, token_units, score_scale,
        BLOCK_SIZE, RANK, ROTARY, ROTARY_BLOCK, UNIT, ROWS, TILE,
    )  # fmt: skip
    _store_halves(
        out_ptr + first_row * out_row_stride + first_head * out_head_stride,
        rows // GROUP * out_row_stride + rows % GROUP * out_head_stride,
        divide(low, row_sum[:, None]),
        divide(high, row_sum[:, None]),
        live,
        RANK,
    )
