"""Batch-invariant paged attention: the bits of a token's output depend only on its own context.

The formula is the same as in `paged_attention`, where decodes and chunks run in different kernels
that may give the same token different bits. In this module, one compiled kernel computes all
tokens: in chunks of any size and in decodes, after a cached prefix or a preemption, and with any
other sequences in the batch. The kernel always sums over a token's context in this order:

1. Positions are cut into pieces at multiples of `ALIGNED_PIECE`, and pieces into tiles. Pieces and
tiles are counted from position 0. 2. Each piece starts an online softmax over its tiles. A tile
that a token does not see leaves the token's maximum, sum and output exactly as they are. 3. Pieces
are joined from first to last, starting from the sinks. Either one program joins all pieces of its
tile, or programs store the states of their pieces and `merge_partials` joins the states with the
same operations. The join uses explicit fused multiply-adds.

The work list has one item per tile of a chunk's query tokens, with all pieces that these tokens
see. A decode is one item with all its pieces, or one item per piece; both give the same sums. The
work list is made on the device, like the list in `decode_plan.py`. A prefix that several sequences
share is read once for each sequence.

Sources: "Defeating Nondeterminism in LLM Inference" (He and Thinking Machines Lab 2025) proposes
splits of a fixed size instead of a fixed number of splits, and the same order for prefill and
decode. vLLM's `VLLM_BATCH_INVARIANT` has one split; SGLang's deterministic mode has splits of a
fixed size.
"""

from dataclasses import dataclass

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
)
from batchinfer.kernels.decode_plan import (
    append_items,
    counters_block,
    sequences_at_once,
    set_counters,
    shared_rows,
)
from batchinfer.kernels.launch import OPTIONS, check_launchable, num_persistent
from batchinfer.kernels.paged_attention import check_window, shared_arguments
from batchinfer.kernels.split_kv import (
    MAX_WORKSPACE_BYTES,
    Partials,
    aligned_pieces,
    join_outs,
    join_sums,
    merge_partials,
    store_partials,
)

# Positions per piece, a multiple of every tile size. Joining pieces of this length takes little
# time, and several programs can share a sequence that is longer than a piece.
ALIGNED_PIECE = 2048


@dataclass(frozen=True)
class BatchInvariantWork:
    items: torch.Tensor  # [N, 2] int32: sequence; tile of query tokens, or piece of a decode
    # [1 + num_launches] int32: N, then the number of items that each launch has taken.
    counters: torch.Tensor
    partials: Partials
    max_pieces: int  # 1: each decode is one item
    piece: int  # positions per piece
    tokens: int  # query tokens per tile, at most
    window: int


def plan_batch_invariant(
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    *,
    tokens: int,
    num_tokens: int,
    max_chunks: int,
    num_heads: int,
    value_width: int,
    max_context_len: int,
    sliding_window: int = 0,
    num_launches: int = 1,
    piece: int | None = None,
    splits: bool = True,
) -> BatchInvariantWork:
    """List the work of a step.

    Args:
        tokens: query tokens per tile, from `batch_invariant_query_tile`.
        num_tokens: upper bound on the total query tokens of chunks.
        num_launches: number of attention layers, each of which uses the list once.
        piece: positions per piece (default: `ALIGNED_PIECE`), which affects the bits of results.
        splits: true to allow one item per piece of a decode if the partial results fit into the
            workspace.
    """
    num_sequences, device = len(context_lens), context_lens.device
    piece = piece or ALIGNED_PIECE
    # A window may begin inside a piece.
    reach = min(max_context_len, sliding_window + piece) if sliding_window else max_context_len
    max_pieces = max(1, -(-reach // piece))
    floats = num_sequences * num_heads * max_pieces * (value_width + 2)
    if not splits or 4 * floats > MAX_WORKSPACE_BYTES:
        max_pieces = 1
    max_items = num_sequences * max_pieces + num_tokens // tokens + max_chunks
    work = BatchInvariantWork(
        items=torch.empty(max_items, 2, dtype=torch.int32, device=device),
        counters=torch.empty(1 + num_launches, dtype=torch.int32, device=device),
        partials=Partials.empty(num_sequences, num_heads, max_pieces, value_width, device),
        max_pieces=max_pieces,
        piece=piece,
        tokens=tokens,
        window=sliding_window,
    )
    _plan_batch_invariant_kernel[(1,)](
        query_starts,
        context_lens,
        work.items,
        work.counters,
        num_sequences,
        max_items,
        max_pieces,
        sliding_window or None,
        1 + num_launches,
        COUNTERS_BLOCK=counters_block(num_launches),
        PIECE=piece,
        TOKENS=tokens,
        SEQUENCES=sequences_at_once(num_sequences),
        **OPTIONS,
    )
    return work


def batch_invariant_config(heads: Heads) -> LaunchConfig:
    """Return the launch shape: at least 64 rows, the smallest number that a Hopper warp group can
    multiply.

    In a decode, most rows are padding. Padding costs nothing, because reading the context takes
    longer than multiplying. Tiles are as long as the registers allow.
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


def batch_invariant_query_tile(heads: Heads) -> int:
    return batch_invariant_config(heads).rows // heads.group


def batch_invariant_attention(
    query: torch.Tensor,  # [T, Hq, Dk], packed over sequences
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dk], any strides; or float8
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, Dv], any strides
    block_tables: torch.Tensor,  # [S, max_blocks] int32, width contiguous
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32, tokens in the cache after this step
    *,
    scale: float,
    out: torch.Tensor,  # [T, Hq, Dv], written in place
    work: BatchInvariantWork,
    launch: int = 0,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [Hq]
    query_ends: torch.Tensor | None = None,  # [T] int32
    prompt_lens: torch.Tensor | None = None,  # [S] int32
) -> None:
    """Compute attention into `out`. The cache must already hold this step's keys and values.

    Rows of `query` and `out` from query_starts[S] onward are neither read nor written.

    Args:
        work: from `plan_batch_invariant` for the same lengths and window.
        launch: index of this launch among those that use `work`.
        query_ends, prompt_lens: as in `paged_attention`.
    """
    check_launchable(
        "batch_invariant_attention", query, key_cache, value_cache, block_tables, query_starts,
        context_lens, out, sinks, query_ends, prompt_lens,
    )  # fmt: skip
    if len(context_lens) == 0 or len(query) == 0:
        return
    check_window(work.window, sliding_window, prompt_lens)
    shared = shared_arguments(
        query, key_cache, value_cache, block_tables, query_starts, context_lens, out, sinks,
        scale, sliding_window, softcap, prompt_lens,
    )  # fmt: skip
    num_kv_heads = key_cache.shape[1]
    config = batch_invariant_config(Heads.of(query, key_cache, value_cache))
    num_programs = num_persistent(query.device, len(work.items) * num_kv_heads)
    value_block = padded(value_cache.shape[3])
    totals = work.partials.out_ptr.new_empty(num_programs, 2, config.rows, value_block)
    _batch_invariant_kernel[(num_programs,)](
        **shared,
        query_ends_ptr=query_ends,
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
            window=shared["window"] if prompt_lens is None else None,
            max_pieces=work.max_pieces,
            piece=work.piece,
            head_groups=num_kv_heads,
            aligned=True,
        )


@triton.jit(do_not_specialize=["table_stride", "max_pieces", "launch"])
def _batch_invariant_kernel(
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
    query_ends_ptr,  # [T] int32 or None
    items_ptr,  # [N, 2] int32: sequence; tile of query tokens, or piece of a decode
    counters_ptr,  # [1 + launches] int32: N, then the number of items that each launch has taken
    partials,  # Partials
    totals_ptr,  # [programs, 2, ROWS, VALUE_BLOCK] float32: sum of previous pieces, current piece
    score_scale,
    cap,  # or None
    window,  # or None
    max_pieces,
    launch,  # index of this launch among those that use the work list
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens per tile
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
        # The number of tokens that earlier steps computed.
        computed = tl.load(context_lens_ptr + sequence) - query_len
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
        begin = first * 0
        prompt_len = None
        if prompt_lens_ptr is not None:
            prompt_len = tl.load(prompt_lens_ptr + sequence)
        elif window is not None:
            begin = tl.maximum(computed + first + 1 - window, 0)
        end = computed + tl.minimum(first + TOKENS, query_len)
        ends = None
        if query_ends_ptr is not None:
            ends = tl.load(query_ends_ptr + query_rows, mask=row_live, other=0)
            end = tl.max(ends, 0)
        first_piece, count = aligned_pieces(begin, end, PIECE)
        is_part = (query_len == 1) & (max_pieces > 1) & (count > 1)
        low = first_piece + tl.where(is_part, number, 0)
        last = tl.where(is_part, low, first_piece + count - 1)
        # If pieces are separate items, `merge_partials` adds the sinks instead. (Triton's
        # interpreter would turn the simpler `row_live & ~is_part` into integers.)
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
                scales, cap, window, TILE, True, ends, prompt_len,
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
                # Registers cannot hold both sums, so the sums are stored in memory and added 16
                # columns at a time.
                at = totals_ptr + tl.program_id(0) * (2 * ROWS * cache.VALUE_BLOCK)
                at += rows[:, None] * cache.VALUE_BLOCK
                piece_at = at + ROWS * cache.VALUE_BLOCK
                tl.store(piece_at + value_columns[None, :], piece_out, mask=row_live[:, None])
                tl.debug_barrier()
                out_rows = query_rows * out_strides[0] + heads * out_strides[1]
                for start in range(0, cache.VALUE_BLOCK, 16):
                    columns = (start + tl.arange(0, 16))[None, :]
                    in_range = row_live[:, None] & (columns < cache.VALUE_WIDTH)
                    before = row_live[:, None] & (
                        columns < tl.where(piece > low, cache.VALUE_WIDTH, 0)
                    )
                    total = join_outs(
                        tl.load(at + columns, mask=before, other=0.0),
                        decay,
                        tl.load(piece_at + columns, mask=in_range, other=0.0),
                        weight,
                    )
                    if piece < last:
                        tl.store(at + columns, total, mask=in_range)
                    else:
                        tl.store(
                            out_ptr + out_rows[:, None] + columns * out_strides[2],
                            divide(total, total_sum[:, None]),
                            mask=in_range,
                        )
                tl.debug_barrier()
        ticket = tl.atomic_add(counters_ptr, 1)


@triton.jit(
    do_not_specialize=["num_sequences", "max_items", "max_pieces", "window", "num_counters"]
)
def _plan_batch_invariant_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    items_ptr,  # [max_items, 2] int32
    counters_ptr,  # [num_counters] int32
    num_sequences,
    max_items,
    max_pieces,
    window,  # or None
    num_counters,
    COUNTERS_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,  # sequences per iteration
):
    num_items = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        sequences = start + tl.arange(0, SEQUENCES)
        in_range = sequences < num_sequences
        query_start = tl.load(query_starts_ptr + sequences, mask=in_range, other=0)
        query_len = tl.load(query_starts_ptr + sequences + 1, mask=in_range, other=0) - query_start
        context_len = tl.load(context_lens_ptr + sequences, mask=in_range, other=0)
        begin = context_len * 0 if window is None else tl.maximum(context_len - window, 0)
        _, count = aligned_pieces(begin, context_len, PIECE)
        count = tl.where(max_pieces > 1, count, 1)
        count = tl.where(query_len == 1, count, tl.cdiv(query_len, TOKENS))
        num_items = append_items(items_ptr, num_items, max_items, sequences, count * 0, count)
    set_counters(counters_ptr, tl.minimum(num_items, max_items), num_counters, COUNTERS_BLOCK)
