# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
# (A kernel's arguments are Triton's own values and mypy cannot type them: what they hold stands in
# the comment behind each. Compile-time constants are written as constants.)
"""The work list of a step's decodes: which pieces of which contexts there are.

A context is cut into pieces of `DECODE_PIECE` tokens. The length is a constant, so that how a row
is summed does not depend on what else is in the step; only where the partial results would take
more than `MAX_WORKSPACE_BYTES` are the pieces of the longest contexts longer. The list is made on
the device from the lengths there, once for all layers of a window, so that a captured step can be
replayed with other lengths. Whole pieces come first and last ones, which are shorter, after them:
programs that take the next piece when they are done then finish close together.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS

# A multiple of every tile.
DECODE_PIECE = 512
MAX_WORKSPACE_BYTES = 256 * 2**20
_SEQUENCES = 1024  # looked at at a time


@dataclass(frozen=True)
class DecodeWork:
    """A step's work list for one window, and room for what its pieces come to."""

    items: torch.Tensor  # [S * max_pieces, 2] int32: sequence, piece
    counters: torch.Tensor  # [1 + num_launches] int32: items, then taken items of each launch
    partial_out: torch.Tensor  # [S, Hq, max_pieces, Dv] float32, not divided by the sum
    partial_max: torch.Tensor  # [S, Hq, max_pieces] float32
    partial_sum: torch.Tensor  # [S, Hq, max_pieces] float32
    max_pieces: int
    piece: int  # tokens
    window: int


def plan_decode(
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    *,
    num_heads: int,
    value_width: int,
    max_context_len: int,
    sliding_window: int = 0,
    num_launches: int = 1,
    num_splits: int | None = None,
) -> DecodeWork:
    """List the pieces of the sequences with one query token.

    Args:
        max_context_len: an upper bound.
        num_launches: attention layers that take the list, each once.
        num_splits: most pieces of a context (default: from `max_context_len`). Every value gives
            the right result.
    """
    num_sequences, device = len(context_lens), context_lens.device
    if num_splits is None:
        reach = min(max_context_len, sliding_window) if sliding_window else max_context_len
        num_splits = default_num_splits(num_sequences, num_heads, value_width, reach)
    partials = (num_sequences, num_heads, num_splits) if num_splits > 1 else (1, 1, 1)
    maximum, total = torch.empty((2, *partials), dtype=torch.float32, device=device).unbind()
    work = DecodeWork(
        items=torch.empty(num_sequences * num_splits, 2, dtype=torch.int32, device=device),
        counters=torch.empty(1 + num_launches, dtype=torch.int32, device=device),
        partial_out=torch.empty(*partials, value_width, dtype=torch.float32, device=device),
        partial_max=maximum,
        partial_sum=total,
        max_pieces=num_splits,
        piece=DECODE_PIECE,
        window=sliding_window,
    )
    _plan_kernel[(1,)](
        query_starts,
        context_lens,
        work.items,
        work.counters,
        num_sequences,
        sliding_window,
        num_splits,
        NUM_COUNTERS=1 + num_launches,
        COUNTERS_BLOCK=triton.next_power_of_2(1 + num_launches),
        WINDOWED=sliding_window > 0,
        PIECE=DECODE_PIECE,
        SEQUENCES=min(_SEQUENCES, triton.next_power_of_2(num_sequences)),
        **OPTIONS,
    )
    return work


def default_num_splits(num_sequences: int, num_heads: int, value_width: int, reach: int) -> int:
    """Pieces of `DECODE_PIECE` tokens that cover `reach` tokens, as far as the workspace allows."""
    # One more than the division says: a window need not start where a piece does.
    wanted = -(-reach // DECODE_PIECE) + 1 if reach > DECODE_PIECE else 1
    affordable = MAX_WORKSPACE_BYTES // (4 * num_sequences * num_heads * (value_width + 2))
    return max(1, min(wanted, affordable))


@triton.jit
def pieces(
    context_len,  # [...]
    window,
    max_pieces,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
):
    # PIECE tokens each, from a multiple of 64 on, which is one of every tile; longer ones only
    # where max_pieces of them do not reach the end. There is always a first piece, be it empty,
    # since it writes the output.
    begin = tl.maximum(context_len - window, 0) if WINDOWED else context_len * 0
    first = begin // 64 * 64
    span = context_len - first
    length = tl.maximum(tl.cdiv(tl.cdiv(span, max_pieces), 64) * 64, PIECE)
    count = tl.maximum(tl.cdiv(span, length), 1)
    return begin, first, length, count


@triton.jit
def _piece_counts(
    query_starts_ptr,
    context_lens_ptr,
    sequences,  # [SEQUENCES]
    num_sequences,
    window,
    max_pieces,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
):
    # Of sequences that compute one token; 0 for the others.
    there = sequences < num_sequences
    start = tl.load(query_starts_ptr + sequences, mask=there, other=0)
    stop = tl.load(query_starts_ptr + sequences + 1, mask=there, other=0)
    context_len = tl.load(context_lens_ptr + sequences, mask=there, other=0)
    _, _, _, count = pieces(context_len, window, max_pieces, WINDOWED, PIECE)
    return tl.where(stop - start == 1, count, 0)


@triton.jit(do_not_specialize=["num_sequences", "window", "max_pieces"])
def _plan_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    items_ptr,  # [S * max_pieces, 2] int32
    counters_ptr,  # [NUM_COUNTERS] int32
    num_sequences,
    window,
    max_pieces,
    NUM_COUNTERS: tl.constexpr,
    COUNTERS_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
    SEQUENCES: tl.constexpr,  # at a time
):
    num_items = tl.full([], 0, tl.int32)
    num_last = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        sequences = start + tl.arange(0, SEQUENCES)
        count = _piece_counts(
            query_starts_ptr, context_lens_ptr, sequences, num_sequences, window, max_pieces,
            WINDOWED, PIECE,
        )  # fmt: skip
        num_items += tl.sum(count)
        num_last += tl.sum(tl.minimum(count, 1))
    counters = tl.arange(0, COUNTERS_BLOCK)
    tl.store(
        counters_ptr + counters,
        tl.where(counters == 0, num_items, 0),
        mask=counters < NUM_COUNTERS,
    )

    next_whole = tl.full([], 0, tl.int32)
    next_last = num_items - num_last
    for start in range(0, num_sequences, SEQUENCES):
        sequences = start + tl.arange(0, SEQUENCES)
        count = _piece_counts(
            query_starts_ptr, context_lens_ptr, sequences, num_sequences, window, max_pieces,
            WINDOWED, PIECE,
        )  # fmt: skip
        last = tl.minimum(count, 1)
        whole = count - last
        last_at = (next_last + tl.cumsum(last, 0) - last).to(tl.int64)
        tl.store(items_ptr + 2 * last_at, sequences, mask=last > 0)
        tl.store(items_ptr + 2 * last_at + 1, whole, mask=last > 0)
        whole_at = (next_whole + tl.cumsum(whole, 0) - whole).to(tl.int64)
        for piece in range(0, tl.max(whole, 0)):
            tl.store(items_ptr + 2 * (whole_at + piece), sequences, mask=piece < whole)
            numbers = tl.zeros([SEQUENCES], tl.int32) + piece
            tl.store(items_ptr + 2 * (whole_at + piece) + 1, numbers, mask=piece < whole)
        next_whole += tl.sum(whole)
        next_last += tl.sum(last)
