"""The work list of a step's decodes: the pieces of their contexts.

A context is cut into pieces of `DECODE_PIECE` tokens. The length is a constant, so that how a row
is summed does not depend on the rest of the step; only where the partial results would take more
than `MAX_WORKSPACE_BYTES` are the pieces of the longest contexts longer. The list is made on the
device from the lengths there, once for all layers of a window, so that a captured step can be
replayed with other lengths.

A whole piece that several sequences have in the same blocks is listed once for as many of them as
fill a tile (`shared_attention.py`), not for each. Sequences that share are neighbors in `order`, so
that a shared piece is a run of it: neighbors i and i + 1 share piece p where shared_lens[i + 1]
reaches its end. A run ends at a sequence that does not decode, or not in pieces of the usual
length. Shared items follow the others; there is room, since each replaces at least one item of a
single sequence.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import padded
from batchinfer.kernels.launch import OPTIONS
from batchinfer.kernels.split_kv import MAX_WORKSPACE_BYTES, Partials, pieces

# A multiple of every tile.
DECODE_PIECE = 512
SEQUENCES_AT_ONCE = 1024  # that a program which makes a list looks at
_SHARED_ROWS = 64  # of a tile of a shared piece: the least that a Hopper warp group multiplies


@dataclass(frozen=True)
class DecodeWork:
    """A step's work list for one window, and room for its pieces' results."""

    items: torch.Tensor  # [S * max_pieces, 2] int32: sequence, or first of a tile in order; piece
    counters: torch.Tensor  # [2, 1 + num_launches] int32: items, then taken items of each launch;
    # first of single ones, then of shared ones
    partials: Partials
    max_pieces: int
    piece: int  # tokens
    window: int
    order: torch.Tensor | None  # [S] int32; None: nothing is shared
    decode_shared: torch.Tensor | None  # [S] int32: shared_lens between decodes, 0 elsewhere
    tile_sequences: int  # of a shared item, at most


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
    """List the pieces of the sequences with one query token.

    Args:
        order: the sequences, such that those with a common prefix are neighbors.
        shared_lens: leading tokens that each sequence of `order` has in common with the one
            before it, in the same blocks, and that come before the query tokens of both. With a
            window they are not used.
        max_context_len: an upper bound.
        num_launches: attention layers that take the list, each once.
        num_splits: most pieces of a context (default: from `max_context_len`). Every value gives
            the right result.
    """
    num_sequences, device = len(context_lens), context_lens.device
    group = num_heads // num_kv_heads
    if num_splits is None:
        reach = min(max_context_len, sliding_window) if sliding_window else max_context_len
        num_splits = default_num_splits(num_sequences, num_heads, value_width, reach)
    assert num_splits == 1 or (
        math.prod((num_sequences, num_heads, num_splits, value_width)) < 2**31
    ), "num_splits: partial results have int32 places"
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
        NUM_COUNTERS=1 + num_launches,
        COUNTERS_BLOCK=triton.next_power_of_2(1 + num_launches),
        PIECE=DECODE_PIECE,
        SEQUENCES=min(SEQUENCES_AT_ONCE, triton.next_power_of_2(num_sequences)),
        **OPTIONS,
    )
    return work


def default_num_splits(num_sequences: int, num_heads: int, value_width: int, reach: int) -> int:
    """Pieces of `DECODE_PIECE` tokens that cover `reach` tokens, as far as the workspace allows."""
    # One more than the division says: a window need not start where a piece does.
    wanted = -(-reach // DECODE_PIECE) + 1 if reach > DECODE_PIECE else 1
    affordable = MAX_WORKSPACE_BYTES // (4 * num_sequences * num_heads * (value_width + 2))
    return max(1, min(wanted, affordable))


def shared_rows(group: int) -> int:
    """Rows of a tile of a shared piece: sequences times the query heads of a KV head."""
    return max(_SHARED_ROWS, padded(group))


@triton.jit
def append_items(
    items_ptr,  # [max_items, 2] int32
    num_items,  # listed so far
    max_items,
    sequences,  # [N] int32
    first,  # [N] int32
    count,  # [N] int32, or bool
    STEP: tl.constexpr = 1,
):
    """Append (sequence, number) pairs, and return the new number of items.

    The numbers of a sequence are first, first + STEP, ..., `count` of them, the last one first:
    the last tile of a chunk sees the longest context, so that what runs at the end is short.
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
def set_counters(counters_ptr, num_items, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Write the number of items, and that no launch has taken any."""
    places = tl.arange(0, BLOCK)
    tl.store(counters_ptr + places, tl.where(places == 0, num_items, 0), mask=places < NUM)


@triton.jit
def _lengths(
    query_starts_ptr,
    context_lens_ptr,
    order_ptr,
    places,  # [SEQUENCES], in the order
    num_sequences,
    window,
    max_pieces,
    PIECE: tl.constexpr,
):
    """The sequences at these places, the number of pieces that each decodes in, and whether the
    pieces have the usual length."""
    there = (places >= 0) & (places < num_sequences)
    sequences = places
    if order_ptr is not None:
        sequences = tl.load(order_ptr + places, mask=there, other=0)
    start = tl.load(query_starts_ptr + sequences, mask=there, other=0)
    stop = tl.load(query_starts_ptr + sequences + 1, mask=there, other=0)
    context_len = tl.load(context_lens_ptr + sequences, mask=there, other=0)
    _, _, length, count = pieces(context_len, window, max_pieces, PIECE)
    count = tl.where(stop - start == 1, count, 0)
    return sequences, count, (count > 0) & (length == PIECE)


@triton.jit
def _shared_on_both_sides(shared_lens_ptr, places, num_sequences):
    """Leading tokens in common with the sequence before, and with the one after."""
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

    A run of sequences that share a piece is cut into tiles from its first sequence on; an item is
    the place of a tile's first sequence, and the piece.
    """
    longest = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        places = start + tl.arange(0, SEQUENCES)
        shared = tl.load(decode_shared_ptr + places, mask=places < num_sequences, other=0)
        longest = tl.maximum(longest, tl.max(shared))
    for piece in range(0, longest // PIECE):
        end = (piece + 1) * PIECE
        run = tl.full([], 0, tl.int32)  # place of the run's first sequence
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


@triton.jit(do_not_specialize=["num_sequences", "window", "max_pieces", "tile_sequences"])
def _plan_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    order_ptr,  # [S] int32 or None
    shared_lens_ptr,  # [S] int32 or None
    decode_shared_ptr,  # [S] int32 or None, written here
    items_ptr,  # [S * max_pieces, 2] int32
    counters_ptr,  # [2, NUM_COUNTERS] int32
    num_sequences,
    window,  # or None
    max_pieces,
    tile_sequences,
    NUM_COUNTERS: tl.constexpr,
    COUNTERS_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,  # at a time
):
    if order_ptr is not None:
        for start in range(0, num_sequences, SEQUENCES):
            places = start + tl.arange(0, SEQUENCES)
            there = places < num_sequences
            _, _, usual = _lengths(
                query_starts_ptr, context_lens_ptr, order_ptr, places, num_sequences, window,
                max_pieces, PIECE,
            )  # fmt: skip
            _, _, usual_before = _lengths(
                query_starts_ptr, context_lens_ptr, order_ptr, places - 1, num_sequences, window,
                max_pieces, PIECE,
            )  # fmt: skip
            shared = tl.load(shared_lens_ptr + places, mask=there, other=0)
            shared = tl.where(usual & usual_before, shared, 0)
            tl.store(decode_shared_ptr + places, shared, mask=there)
        tl.debug_barrier()  # every thread reads what others have written

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
            # The last piece is never shared: shared tokens come before the step's.
            before, after = _shared_on_both_sides(decode_shared_ptr, places, num_sequences)
            first = tl.maximum(before, after) // PIECE
        num_single = append_items(items_ptr, num_single, max_items, sequences, first, count - first)
    num_items = num_single
    if order_ptr is not None:
        num_items = _list_shared(
            decode_shared_ptr, items_ptr, num_single, max_items, num_sequences, tile_sequences,
            PIECE, SEQUENCES,
        )  # fmt: skip
    set_counters(counters_ptr, num_single, NUM_COUNTERS, COUNTERS_BLOCK)
    num_shared = num_items - num_single
    set_counters(counters_ptr + NUM_COUNTERS, num_shared, NUM_COUNTERS, COUNTERS_BLOCK)
