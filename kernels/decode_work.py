"""The work list of a step's decodes: which pieces of which contexts there are.

A context is cut into pieces of `DECODE_PIECE` tokens. The length is a constant, so that how a row
is summed does not depend on what else is in the step; only where the partial results would take
more than `MAX_WORKSPACE_BYTES` are the pieces of the longest contexts longer. The list is made on
the device from the lengths there, once for all layers of a window, so that a captured step can be
replayed with other lengths. Whole pieces come first and last ones, which are shorter, after them:
programs that take the next piece when they are done then finish close together.

A whole piece that several sequences have in the same blocks is listed once for as many of them as
fill a tile (`shared_attention.py`), and not for each. Sequences that share stand side by side in
`order`, so that a shared piece is a run of it: piece p is shared by neighbours i and i + 1 where
shared_lens[i + 1] reaches its end. A run ends at a sequence that does not decode, or not in pieces
of the usual length. Such items lie behind the others; there is room, since each stands for at least
one of a single sequence.
"""

import math
from dataclasses import dataclass

import torch
import triton

from batchinfer.kernels.attend import padded
from batchinfer.kernels.decode_list import _plan_kernel
from batchinfer.kernels.launch import OPTIONS

# A multiple of every tile.
DECODE_PIECE = 512
MAX_WORKSPACE_BYTES = 256 * 2**20
_SEQUENCES = 1024  # looked at at a time
_SHARED_ROWS = 64  # of a tile of a shared piece: the least that a Hopper warp group multiplies


@dataclass(frozen=True)
class DecodeWork:
    """A step's work list for one window, and room for its pieces' results."""

    items: torch.Tensor  # [S * max_pieces, 2] int32: sequence, or first of a tile in order; piece
    counters: torch.Tensor  # [2, 1 + num_launches] int32: items, then taken items of each launch;
    # first of single ones, then of shared ones
    partial_out: torch.Tensor  # [S, Hq, max_pieces, Dv] float32, not divided by the sum
    partial_max: torch.Tensor  # [S, Hq, max_pieces] float32
    partial_sum: torch.Tensor  # [S, Hq, max_pieces] float32
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
        order: the sequences, such that those with a common prefix stand side by side.
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
    partials = (num_sequences, num_heads, num_splits) if num_splits > 1 else (1, 1, 1)
    assert math.prod(partials) * value_width < 2**31, (
        "num_splits: partial results have int32 places"
    )
    maximum, total = torch.empty((2, *partials), dtype=torch.float32, device=device).unbind()
    if sliding_window:
        order = shared_lens = None
    work = DecodeWork(
        items=torch.empty(num_sequences * num_splits, 2, dtype=torch.int32, device=device),
        counters=torch.empty(2, 1 + num_launches, dtype=torch.int32, device=device),
        partial_out=torch.empty(*partials, value_width, dtype=torch.float32, device=device),
        partial_max=maximum,
        partial_sum=total,
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
        sliding_window,
        num_splits,
        work.tile_sequences,
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


def shared_rows(group: int) -> int:
    """Rows of a tile of a shared piece: sequences times the query heads of a KV head."""
    return max(_SHARED_ROWS, padded(group))
