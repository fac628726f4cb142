"""The kernel that makes a work list of decodes; `decode_work.py` says what it holds."""

import triton
import triton.language as tl


@triton.jit
def pieces(
    context_len,  # [...]
    window,
    max_pieces,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
):
    # PIECE tokens each, from a multiple of 128 on, which is one of every tile; some times as many
    # only where max_pieces of them do not reach the end. There is always a first piece, be it
    # empty, since it writes the output.
    begin = tl.maximum(context_len - window, 0) if WINDOWED else context_len * 0
    first = begin // 128 * 128
    span = context_len - first
    length = tl.maximum(tl.cdiv(tl.cdiv(span, max_pieces), PIECE), 1) * PIECE
    count = tl.maximum(tl.cdiv(span, length), 1)
    return begin, first, length, count


@triton.jit
def _lengths(
    query_starts_ptr,
    context_lens_ptr,
    order_ptr,
    places,  # [SEQUENCES], in the order
    num_sequences,
    window,
    max_pieces,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
):
    # The sequences there, in how many pieces each decodes, and whether those have the usual length.
    there = (places >= 0) & (places < num_sequences)
    sequences = places
    if order_ptr is not None:
        sequences = tl.load(order_ptr + places, mask=there, other=0)
    start = tl.load(query_starts_ptr + sequences, mask=there, other=0)
    stop = tl.load(query_starts_ptr + sequences + 1, mask=there, other=0)
    context_len = tl.load(context_lens_ptr + sequences, mask=there, other=0)
    _, _, length, count = pieces(context_len, window, max_pieces, WINDOWED, PIECE)
    count = tl.where(stop - start == 1, count, 0)
    return sequences, count, (count > 0) & (length == PIECE)


@triton.jit
def _shared_on_both_sides(shared_lens_ptr, places, num_sequences):
    # Leading tokens in common with the sequence before and with the one after.
    before = tl.load(shared_lens_ptr + places, mask=places < num_sequences, other=0)
    after = tl.load(shared_lens_ptr + places + 1, mask=places + 1 < num_sequences, other=0)
    return before, after


@triton.jit
def _own_pieces(
    query_starts_ptr,
    context_lens_ptr,
    order_ptr,
    decode_shared_ptr,
    places,  # [SEQUENCES], in the order
    num_sequences,
    window,
    max_pieces,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
):
    # The sequences there, first and number of the pieces that each has to itself. The last piece
    # is always one: what is shared comes before the step's token.
    sequences, count, _ = _lengths(
        query_starts_ptr, context_lens_ptr, order_ptr, places, num_sequences, window, max_pieces,
        WINDOWED, PIECE,
    )  # fmt: skip
    first = count * 0
    if order_ptr is not None:
        before, after = _shared_on_both_sides(decode_shared_ptr, places, num_sequences)
        first = tl.maximum(before, after) // PIECE
    return sequences, first, count - first


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _list_shared(
    decode_shared_ptr,  # [S] int32
    items_ptr,  # [..., 2] int32, the shared ones
    num_sequences,
    tile_sequences,
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    # Returns the number of items. A run of sequences that have a piece in common is cut into tiles
    # from its first one on; an item is the place of a tile's first sequence, and the piece.
    longest = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        places = start + tl.arange(0, SEQUENCES)
        shared = tl.load(decode_shared_ptr + places, mask=places < num_sequences, other=0)
        longest = tl.maximum(longest, tl.max(shared))
    num_items = tl.full([], 0, tl.int32)
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
            chosen = begins_tile.to(tl.int32)
            at = (num_items + tl.cumsum(chosen, 0) - chosen).to(tl.int64)
            tl.store(items_ptr + 2 * at, places, mask=begins_tile)
            numbers = tl.zeros([SEQUENCES], tl.int32) + piece
            tl.store(items_ptr + 2 * at + 1, numbers, mask=begins_tile)
            num_items += tl.sum(chosen)
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
    window,
    max_pieces,
    tile_sequences,
    NUM_COUNTERS: tl.constexpr,
    COUNTERS_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,  # at a time
):
    if order_ptr is not None:
        for start in range(0, num_sequences, SEQUENCES):
            places = start + tl.arange(0, SEQUENCES)
            there = places < num_sequences
            _, _, usual = _lengths(
                query_starts_ptr, context_lens_ptr, order_ptr, places, num_sequences, window,
                max_pieces, WINDOWED, PIECE,
            )  # fmt: skip
            _, _, usual_before = _lengths(
                query_starts_ptr, context_lens_ptr, order_ptr, places - 1, num_sequences, window,
                max_pieces, WINDOWED, PIECE,
            )  # fmt: skip
            shared = tl.load(shared_lens_ptr + places, mask=there, other=0)
            shared = tl.where(usual & usual_before, shared, 0)
            tl.store(decode_shared_ptr + places, shared, mask=there)
        tl.debug_barrier()  # every thread reads what others have written

    num_items = tl.full([], 0, tl.int32)
    num_last = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        places = start + tl.arange(0, SEQUENCES)
        _, _, count = _own_pieces(
            query_starts_ptr, context_lens_ptr, order_ptr, decode_shared_ptr, places,
            num_sequences, window, max_pieces, WINDOWED, PIECE,
        )  # fmt: skip
        num_items += tl.sum(count)
        num_last += tl.sum(tl.minimum(count, 1))

    next_whole = tl.full([], 0, tl.int32)
    next_last = num_items - num_last
    for start in range(0, num_sequences, SEQUENCES):
        places = start + tl.arange(0, SEQUENCES)
        sequences, first, count = _own_pieces(
            query_starts_ptr, context_lens_ptr, order_ptr, decode_shared_ptr, places,
            num_sequences, window, max_pieces, WINDOWED, PIECE,
        )  # fmt: skip
        last = tl.minimum(count, 1)
        whole = count - last
        last_at = (next_last + tl.cumsum(last, 0) - last).to(tl.int64)
        tl.store(items_ptr + 2 * last_at, sequences, mask=last > 0)
        tl.store(items_ptr + 2 * last_at + 1, first + whole, mask=last > 0)
        whole_at = (next_whole + tl.cumsum(whole, 0) - whole).to(tl.int64)
        for piece in range(0, tl.max(whole, 0)):
            tl.store(items_ptr + 2 * (whole_at + piece), sequences, mask=piece < whole)
            tl.store(items_ptr + 2 * (whole_at + piece) + 1, first + piece, mask=piece < whole)
        next_whole += tl.sum(whole)
        next_last += tl.sum(last)

    num_shared = tl.full([], 0, tl.int32)
    if order_ptr is not None:
        num_shared = _list_shared(
            decode_shared_ptr, items_ptr + 2 * num_items.to(tl.int64), num_sequences,
            tile_sequences, PIECE, SEQUENCES,
        )  # fmt: skip
    counters = tl.arange(0, COUNTERS_BLOCK)
    for shared in tl.static_range(2):
        tl.store(
            counters_ptr + shared * NUM_COUNTERS + counters,
            tl.where(counters == 0, num_shared if shared else num_items, 0),
            mask=counters < NUM_COUNTERS,
        )
