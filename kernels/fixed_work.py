"""The work list of attention in a fixed order of sums.

Contexts are cut into pieces at multiples of `FIXED_PIECE` positions. An item is a tile of a chunk's
query tokens with all the pieces they see, or the one token of a decode with one piece, or with all:
the choice is free, since the sums are the same. The list is made on the device, once for the
layers of a window, so that a captured step can be replayed with other lengths.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.decode_work import SEQUENCES_AT_ONCE, append_items, set_counters
from batchinfer.kernels.launch import OPTIONS
from batchinfer.kernels.pieces import MAX_WORKSPACE_BYTES, Partials, fixed_pieces

# A multiple of every tile. Joining pieces costs a long context little, and from this length on
# several programs share a single sequence.
FIXED_PIECE = 2048


@dataclass(frozen=True)
class FixedWork:
    """A step's work list for one window, and room for the results of pieces of decodes."""

    items: torch.Tensor  # [N, 2] int32: sequence; tile of query tokens, or piece of a decode
    counters: torch.Tensor  # [1 + num_launches] int32: items, then taken ones of each launch
    partials: Partials
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
    """List the work of a step.

    Args:
        tokens: of a tile (`fixed_query_tile`).
        num_tokens: an upper bound on the query tokens of sequences that have several.
        max_chunks: an upper bound on such sequences.
        max_context_len: an upper bound.
        num_launches: attention layers that take the list, each once.
        piece: positions of a piece (default: `FIXED_PIECE`); bits depend on it.
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
    max_items = num_sequences * max_pieces + num_tokens // tokens + max_chunks
    work = FixedWork(
        items=torch.empty(max_items, 2, dtype=torch.int32, device=device),
        counters=torch.empty(1 + num_launches, dtype=torch.int32, device=device),
        partials=Partials.empty(num_sequences, num_heads, max_pieces, value_width, device),
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
        sliding_window or None,
        NUM_COUNTERS=1 + num_launches,
        COUNTERS_BLOCK=triton.next_power_of_2(1 + num_launches),
        PIECE=piece,
        TOKENS=tokens,
        SEQUENCES=min(SEQUENCES_AT_ONCE, triton.next_power_of_2(num_sequences)),
        **OPTIONS,
    )
    return work


@triton.jit(do_not_specialize=["num_sequences", "max_items", "max_pieces", "window"])
def _plan_fixed_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    items_ptr,  # [max_items, 2] int32
    counters_ptr,  # [NUM_COUNTERS] int32
    num_sequences,
    max_items,
    max_pieces,
    window,  # or None
    NUM_COUNTERS: tl.constexpr,
    COUNTERS_BLOCK: tl.constexpr,
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
        begin = context_len * 0 if window is None else tl.maximum(context_len - window, 0)
        _, count = fixed_pieces(begin, context_len, PIECE)
        count = tl.where(max_pieces > 1, count, 1)
        count = tl.where(query_len == 1, count, tl.cdiv(query_len, TOKENS))
        num_items = append_items(items_ptr, num_items, max_items, sequences, count * 0, count)
    set_counters(counters_ptr, tl.minimum(num_items, max_items), NUM_COUNTERS, COUNTERS_BLOCK)
