"""The work list of a step's decodes, whose items are pieces of the decodes' contexts.

A context is cut into pieces of `DECODE_PIECE` tokens. The length of a piece is constant, so the
order in which a row's terms are added does not depend on other rows of the step. If the partial
results would take more than `MAX_WORKSPACE_BYTES`, the longest contexts get longer pieces. The work
list is made once for all layers with the same window. The work list is made on the device, from
lengths in device memory, so that a captured step can be replayed with other lengths.

If several sequences store a whole piece in the same blocks, the list has one shared item per tile
of sequences (`shared_attention.py`) instead of one item per sequence. Sequences that share a prefix
are adjacent in `order`, so a shared piece belongs to a run of sequences: sequences i and i + 1 of
`order` share piece p if shared_lens[i + 1] reaches the end of the piece. A run ends before a
sequence that does not decode, or whose pieces have another length. Shared items come after single
items in the list. The list always has space for shared items, because each shared item replaces at
least one single item.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import padded
from batchinfer.kernels.launch import OPTIONS
from batchinfer.kernels.split_kv import MAX_WORKSPACE_BYTES, Partials, pieces

DECODE_PIECE = 512  # in tokens; a multiple of every tile size
SEQUENCES_AT_ONCE = 1024  # largest number of sequences per iteration of planning kernels
_FEW_SEQUENCES = 64
_COUNTERS_BLOCK = 128
# Rows of a shared piece's tile: the smallest number that a Hopper warp group can multiply.
_SHARED_ROWS = 64


@dataclass(frozen=True)
class DecodeWork:
    # [S * max_pieces, 2] int32: sequence and piece. For a shared item, the sequence is replaced by
    # the index of the item's first sequence in `order`.
    items: torch.Tensor
    # [2, 1 + num_launches] int32; row 0 counts single items, and row 1 shared items: the number of
    # items, then the number of items that each launch has taken.
    counters: torch.Tensor
    partials: Partials
    max_pieces: int
    piece: int  # tokens per piece
    window: int
    order: torch.Tensor | None  # [S] int32; None: no prefixes are shared
    # [S] int32: shared_lens if this sequence and the previous one can share pieces, else 0.
    decode_shared: torch.Tensor | None
    tile_sequences: int  # sequences of a shared item, at most


def plan_decode(
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    *,
    order: torch.Tensor | None = None,  # [S] int32
    shared_lens: torch.Tensor | None = None,  # [S] int32
    num_heads: int,
    num_kv_heads: int,
    value_width: int,
    max_context_len: int,
    sliding_window: int = 0,
    num_launches: int = 1,
    num_splits: int | None = None,
) -> DecodeWork:
    """List the pieces of all decodes: sequences with one query token.

    Args:
        order: the indices of all sequences; sequences that share a prefix are adjacent. Ignored if
            there is a window.
        shared_lens: number of leading tokens that each sequence of `order` shares with the previous
            sequence. Shared tokens are in the same blocks and come before the query tokens of both
            sequences. Ignored if there is a window.
        num_launches: number of attention layers, each of which uses the list once.
        num_splits: largest number of pieces per context (default: from `max_context_len`). Any
            value gives correct results.
    """
    num_sequences, device = len(context_lens), context_lens.device
    group = num_heads // num_kv_heads
    if num_splits is None:
        reach = min(max_context_len, sliding_window) if sliding_window else max_context_len
        num_splits = default_num_splits(num_sequences, num_heads, value_width, reach)
    assert num_splits == 1 or (
        math.prod((num_sequences, num_heads, num_splits, value_width)) < 2**31
    ), "num_splits is too large: offsets of partial results must fit into int32"
    if sliding_window:
        order = shared_lens = None
    work = DecodeWork(
        items=torch.empty(num_sequences * num_splits, 2, dtype=torch.int32, device=device),
        counters=torch.empty(2, 1 + num_launches, dtype=torch.int32, device=device),
        partials=Partials.empty(num_sequences, num_heads, num_splits, value_width, device),
        max_pieces=num_splits,
        piece=DECODE_PIECE,
        window=sliding_window,
        order=order,
        decode_shared=None if shared_lens is None else torch.empty_like(shared_lens),
        tile_sequences=shared_rows(group) // group,
    )
    _plan_kernel[(1,)](
        query_starts,
        context_lens,
        order,
        shared_lens,
        work.decode_shared,
        work.items,
        work.counters,
        num_sequences,
        sliding_window or None,
        num_splits,
        work.tile_sequences,
        1 + num_launches,
        COUNTERS_BLOCK=counters_block(num_launches),
        PIECE=DECODE_PIECE,
        SEQUENCES=sequences_at_once(num_sequences),
        **OPTIONS,
    )
    return work


def sequences_at_once(num_sequences: int) -> int:
    """Return the number of sequences that a planning kernel lists per iteration. Only two values
    are possible, because Triton compiles the kernels once for each value."""
    few = num_sequences <= _FEW_SEQUENCES
    return min(SEQUENCES_AT_ONCE, _FEW_SEQUENCES) if few else SEQUENCES_AT_ONCE


def counters_block(num_launches: int) -> int:
    """Return a power of two that is at least the number of counters. The result is the same for
    nearly all models, so that models share compiled kernels."""
    return max(_COUNTERS_BLOCK, int(triton.next_power_of_2(1 + num_launches)))


def default_num_splits(num_sequences: int, num_heads: int, value_width: int, reach: int) -> int:
    """Return the number of pieces that cover `reach` tokens, or fewer if the workspace is too
    small."""
    # A window that starts inside a piece needs one more piece than the quotient.
    wanted = -(-reach // DECODE_PIECE) + 1 if reach > DECODE_PIECE else 1
    affordable = MAX_WORKSPACE_BYTES // (4 * num_sequences * num_heads * (value_width + 2))
    return max(1, min(wanted, affordable))


def shared_rows(group: int) -> int:
    """Return the number of rows of a shared item's tile: a row for each sequence and each query
    head of a KV head."""
    return max(_SHARED_ROWS, padded(group))


@triton.jit
def append_items(
    items_ptr,  # [max_items, 2] int32
    num_items,  # items in the list so far
    max_items,
    sequences,  # [N] int32
    first,  # [N] int32
    count,  # [N] int32, or bool
    STEP: tl.constexpr = 1,
):
    """Append (sequence, number) pairs, and return the new number of items.

    Each sequence gets `count` numbers: first, first + STEP, and so on. The numbers are listed from
    last to first, because the last tile of a chunk sees the longest context and should start first.
    """
    count = count.to(tl.int32)
    ends = num_items + tl.cumsum(count, 0)
    for number in range(0, tl.max(count, 0)):
        at = (ends - 1 - number).to(tl.int64)
        mask = (number < count) & (at < max_items)
        tl.store(items_ptr + 2 * at, sequences, mask=mask)
        tl.store(items_ptr + 2 * at + 1, first + number * STEP, mask=mask)
    return num_items + tl.sum(count, 0)


@triton.jit
def set_counters(counters_ptr, num_items, num_counters, BLOCK: tl.constexpr):
    """Write the number of items, and 0 for the items that each launch has taken."""
    places = tl.arange(0, BLOCK)
    tl.store(counters_ptr + places, tl.where(places == 0, num_items, 0), mask=places < num_counters)


@triton.jit
def _lengths(
    query_starts_ptr,
    context_lens_ptr,
    order_ptr,
    places,  # [SEQUENCES] indices in the order
    num_sequences,
    window,
    max_pieces,
    PIECE: tl.constexpr,
):
    """Return the sequences at `places`, their numbers of pieces (0 if a sequence does not decode),
    and a mask that is true for sequences whose pieces have PIECE tokens."""
    in_range = (places >= 0) & (places < num_sequences)
    sequences = places
    if order_ptr is not None:
        sequences = tl.load(order_ptr + places, mask=in_range, other=0)
    start = tl.load(query_starts_ptr + sequences, mask=in_range, other=0)
    stop = tl.load(query_starts_ptr + sequences + 1, mask=in_range, other=0)
    context_len = tl.load(context_lens_ptr + sequences, mask=in_range, other=0)
    _, _, length, count = pieces(context_len, window, max_pieces, PIECE)
    count = tl.where(stop - start == 1, count, 0)
    return sequences, count, (count > 0) & (length == PIECE)


@triton.jit
def _shared_on_both_sides(shared_lens_ptr, places, num_sequences):
    """Return the numbers of leading tokens shared with the previous and with the next sequence."""
    before = tl.load(shared_lens_ptr + places, mask=places < num_sequences, other=0)
    after = tl.load(shared_lens_ptr + places + 1, mask=places + 1 < num_sequences, other=0)
    return before, after


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _list_shared(
    decode_shared_ptr,  # [S] int32
    items_ptr,  # [max_items, 2] int32
    num_items,
    max_items,
    num_sequences,
    tile_sequences,
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Append the shared pieces, and return the new number of items.

    Each run of sequences that share a piece is cut into tiles. An item is a pair: the index of a
    tile's first sequence in the order, and the piece.
    """
    longest = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        places = start + tl.arange(0, SEQUENCES)
        shared = tl.load(decode_shared_ptr + places, mask=places < num_sequences, other=0)
        longest = tl.maximum(longest, tl.max(shared))
    for piece in range(0, longest // PIECE):
        end = (piece + 1) * PIECE
        run = tl.full([], 0, tl.int32)  # index of the run's first sequence in the order
        for start in range(0, num_sequences, SEQUENCES):
            places = start + tl.arange(0, SEQUENCES)
            before, after = _shared_on_both_sides(decode_shared_ptr, places, num_sequences)
            begins = (before < end) & (after >= end)
            runs = tl.associative_scan(tl.where(begins, places, run), 0, _larger)
            run = tl.max(runs)
            in_run = tl.maximum(before, after) >= end
            begins_tile = tl.where(in_run, (places - runs) % tile_sequences, 1) == 0
            numbers = tl.zeros([SEQUENCES], tl.int32) + piece
            num_items = append_items(items_ptr, num_items, max_items, places, numbers, begins_tile)
    return num_items


@triton.jit(
    do_not_specialize=["num_sequences", "window", "max_pieces", "tile_sequences", "num_counters"]
)
def _plan_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    order_ptr,  # [S] int32 or None
    shared_lens_ptr,  # [S] int32 or None
    decode_shared_ptr,  # [S] int32 or None: output
    items_ptr,  # [S * max_pieces, 2] int32
    counters_ptr,  # [2, num_counters] int32
    num_sequences,
    window,  # or None
    max_pieces,
    tile_sequences,
    num_counters,
    COUNTERS_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,  # sequences per iteration
):
    if order_ptr is not None:
        for start in range(0, num_sequences, SEQUENCES):
            places = start + tl.arange(0, SEQUENCES)
            in_range = places < num_sequences
            _, _, usual = _lengths(
                query_starts_ptr, context_lens_ptr, order_ptr, places, num_sequences, window,
                max_pieces, PIECE,
            )  # fmt: skip
            _, _, usual_before = _lengths(
                query_starts_ptr, context_lens_ptr, order_ptr, places - 1, num_sequences, window,
                max_pieces, PIECE,
            )  # fmt: skip
            shared = tl.load(shared_lens_ptr + places, mask=in_range, other=0)
            shared = tl.where(usual & usual_before, shared, 0)
            tl.store(decode_shared_ptr + places, shared, mask=in_range)
        tl.debug_barrier()  # threads now read values that other threads have written

    num_single = tl.full([], 0, tl.int32)
    max_items = num_sequences * max_pieces
    for start in range(0, num_sequences, SEQUENCES):
        places = start + tl.arange(0, SEQUENCES)
        sequences, count, _ = _lengths(
            query_starts_ptr, context_lens_ptr, order_ptr, places, num_sequences, window,
            max_pieces, PIECE,
        )  # fmt: skip
        first = count * 0
        if order_ptr is not None:
            # The last piece is never shared, because shared tokens come before the query tokens.
            before, after = _shared_on_both_sides(decode_shared_ptr, places, num_sequences)
            first = tl.maximum(before, after) // PIECE
        num_single = append_items(items_ptr, num_single, max_items, sequences, first, count - first)
    num_items = num_single
    if order_ptr is not None:
        num_items = _list_shared(
            decode_shared_ptr, items_ptr, num_single, max_items, num_sequences, tile_sequences,
            PIECE, SEQUENCES,
        )  # fmt: skip
    set_counters(counters_ptr, num_single, num_counters, COUNTERS_BLOCK)
    num_shared = num_items - num_single
    set_counters(counters_ptr + num_counters, num_shared, num_counters, COUNTERS_BLOCK)
