"""The work list of a step's chunks: which tiles of query tokens there are.

The list is made on the device from the lengths there, once for all layers, so that a captured step
can be replayed with other lengths. Sequences with one query token or none have no tile, wherever
they stand: a launch is as large as its chunks, however many decodes are in the step. A chunk's
tiles come last one first, since that sees the longest context: what runs at the end is short.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS

_SEQUENCES = 1024  # looked at at a time


@dataclass(frozen=True)
class ChunkWork:
    """A step's list of tiles of query tokens."""

    items: torch.Tensor  # [N, 2] int32: sequence, first query token of the tile in it
    num_items: torch.Tensor  # [1] int32
    tokens: int  # of a tile, at most


def plan_chunks(
    query_starts: torch.Tensor,  # [S + 1] int32
    *,
    tokens: int,
    num_tokens: int,
    max_chunks: int | None = None,
) -> ChunkWork:
    """List the tiles of the sequences with several query tokens.

    Args:
        tokens: of a tile (`query_tile`).
        num_tokens: an upper bound on the query tokens of such sequences.
        max_chunks: an upper bound on such sequences (default: all).
    """
    num_sequences = len(query_starts) - 1
    if max_chunks is None:
        max_chunks = num_sequences
    # A sequence's tiles are full but one.
    max_items = num_tokens // tokens + max_chunks
    work = ChunkWork(
        items=torch.empty(max_items, 2, dtype=torch.int32, device=query_starts.device),
        num_items=torch.empty(1, dtype=torch.int32, device=query_starts.device),
        tokens=tokens,
    )
    _plan_chunks_kernel[(1,)](
        query_starts,
        work.items,
        work.num_items,
        num_sequences,
        max_items,
        TOKENS=tokens,
        SEQUENCES=min(_SEQUENCES, triton.next_power_of_2(num_sequences)),
        **OPTIONS,
    )
    return work


@triton.jit(do_not_specialize=["num_sequences", "max_items"])
def _plan_chunks_kernel(
    query_starts_ptr,  # [S + 1] int32
    items_ptr,  # [max_items, 2] int32
    num_items_ptr,  # [1] int32
    num_sequences,
    max_items,
    TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr,  # at a time
):
    num_items = tl.full([], 0, tl.int32)
    for start in range(0, num_sequences, SEQUENCES):
        sequences = start + tl.arange(0, SEQUENCES)
        there = sequences < num_sequences
        begin = tl.load(query_starts_ptr + sequences, mask=there, other=0)
        query_len = tl.load(query_starts_ptr + sequences + 1, mask=there, other=0) - begin
        tiles = tl.where(query_len > 1, tl.cdiv(query_len, TOKENS), 0)
        ends = num_items + tl.cumsum(tiles, 0)
        for tile in range(0, tl.max(tiles, 0)):
            at = ends - 1 - tile
            mask = (tile < tiles) & (at < max_items)
            tl.store(items_ptr + 2 * at, sequences, mask=mask)
            firsts = tl.zeros([SEQUENCES], tl.int32) + tile * TOKENS
            tl.store(items_ptr + 2 * at + 1, firsts, mask=mask)
        num_items += tl.sum(tiles, 0)
    tl.store(num_items_ptr, tl.minimum(num_items, max_items))
