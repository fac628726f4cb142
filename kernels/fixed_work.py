"""The work list of attention in a fixed order of sums.

Contexts are cut into pieces at multiples of `FIXED_PIECE` positions. An item is a tile of a chunk's
query tokens with all the pieces they see, or the one token of a decode with one piece, or with all:
that is free to choose, since the sums are the same. The list is made on the device, once for the
layers of a window, so that a captured step can be replayed with other lengths.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.decode_work import MAX_WORKSPACE_BYTES
from batchinfer.kernels.launch import OPTIONS

# A multiple of every tile. Joining pieces costs a long context little, and one sequence alone has
# several programs from here on.
FIXED_PIECE = 2048
_SEQUENCES = 1024  # looked at at a time


@dataclass(frozen=True)
class FixedWork:
    """A step's work list for one window, and room for what pieces of decodes come to."""

    items: torch.Tensor  # [N, 2] int32: sequence; tile of query tokens, or piece of a decode
    counters: torch.Tensor  # [1 + num_launches] int32: items, then taken ones of each launch
    partial_out: torch.Tensor  # [S, Hq, max_pieces, Dv] float32, not divided by the sum
    partial_max: torch.Tensor  # [S, Hq, max_pieces] float32
    partial_sum: torch.Tensor  # [S, Hq, max_pieces] float32
    max_pieces: int  # 1: each decode is one item
    piece: int  # positions
    tokens: int  # of a tile, at most
    window: int


def plan_fixed(
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
) -> FixedWork:
    """List what there is to attend to.

    Args:
        tokens: of a tile (`fixed_query_tile`).
        num_tokens: an upper bound on the query tokens of sequences that have several.
        max_chunks: an upper bound on such sequences.
        max_context_len: an upper bound.
        num_launches: attention layers that take the list, each once.
        piece: positions of one (default: `FIXED_PIECE`); bits depend on it.
        splits: decodes may be cut into pieces, where their results fit the workspace.
    """
    num_sequences, device = len(context_lens), context_lens.device
    piece = piece or FIXED_PIECE
    # A window need not begin where a piece does.
    reach = min(max_context_len, sliding_window + piece) if sliding_window else max_context_len
    max_pieces = max(1, -(-reach // piece))
    floats = num_sequences * num_heads * max_pieces * (value_width + 2)
    if not splits or 4 * floats > MAX_WORKSPACE_BYTES:
        max_pieces = 1
    partials = (num_sequences, num_heads, max_pieces) if max_pieces > 1 else (1, 1, 1)
    maximum, total = torch.empty((2, *partials), dtype=torch.float32, device=device).unbind()
    max_items = num_sequences * max_pieces + num_tokens // tokens + max_chunks
    work = FixedWork(
        items=torch.empty(max_items, 2, dtype=torch.int32, device=device),
        counters=torch.empty(1 + num_launches, dtype=torch.int32, device=device),
        partial_out=torch.empty(*partials, value_width, dtype=torch.float32, device=device),
        partial_max=maximum,
        partial_sum=total,
        max_pieces=max_pieces,
        piece=piece,
        tokens=tokens,
        window=sliding_window,
    )
    _plan_fixed_kernel[(1,)](
        query_starts,
        context_lens,
        work.items,
        work.counters,
        num_sequences,
        max_items,
        max_pieces,
        sliding_window,
        NUM_COUNTERS=1 + num_launches,
        COUNTERS_BLOCK=triton.next_power_of_2(1 + num_launches),
        WINDOWED=sliding_window > 0,
        PIECE=piece,
        TOKENS=tokens,
        SEQUENCES=min(_SEQUENCES, triton.next_power_of_2(num_sequences)),
        **OPTIONS,
    )
    return work


@triton.jit
def fixed_pieces(
    begin,  # [...] first position and
    end,  # [...] last + 1
    PIECE: tl.constexpr,
):
    # The first piece, counted from position 0, and how many there are: always one, be it empty,
    # since it writes the output.
    first = begin // PIECE
    return first, tl.maximum(tl.cdiv(end, PIECE) - first, 1)


@triton.jit(do_not_specialize=["num_sequences", "max_items", "max_pieces", "window"])
def _plan_fixed_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    items_ptr,  # [max_items, 2] int32
    counters_ptr,  # [NUM_COUNTERS] int32
    num_sequences,
    max_items,
    max_pieces,
    window,
    NUM_COUNTERS: tl.constexpr,
    COUNTERS_BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,  # at a time
):
    num_items = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        sequences = start + tl.arange(0, SEQUENCES)
        there = sequences < num_sequences
        query_start = tl.load(query_starts_ptr + sequences, mask=there, other=0)
        query_len = tl.load(query_starts_ptr + sequences + 1, mask=there, other=0) - query_start
        context_len = tl.load(context_lens_ptr + sequences, mask=there, other=0)
        begin = tl.maximum(context_len - window, 0) if WINDOWED else context_len * 0
        _, count = fixed_pieces(begin, context_len, PIECE)
        count = tl.where(max_pieces > 1, count, 1)
        count = tl.where(query_len == 1, count, tl.cdiv(query_len, TOKENS))
        # The last tile of a chunk sees the longest context: it comes first.
        ends = num_items + tl.cumsum(count, 0)
        for number in range(0, tl.max(count, 0)):
            at = ends - 1 - number
            mask = (number < count) & (at < max_items)
            tl.store(items_ptr + 2 * at, sequences, mask=mask)
            numbers = tl.zeros([SEQUENCES], tl.int32) + number
            tl.store(items_ptr + 2 * at + 1, numbers, mask=mask)
        num_items += tl.sum(count, 0)
    counters = tl.arange(0, COUNTERS_BLOCK)
    tl.store(
        counters_ptr + counters,
        tl.where(counters == 0, tl.minimum(num_items, max_items), 0),
        mask=counters < NUM_COUNTERS,
    )
