"""Cuts contexts into pieces, and merges the results of pieces (split-KV, as in Flash-Decoding).

The result of a piece is the state (m, l, o) of each row: the maximum score, the sum of weights, and
the output before the division by that sum (`README.md`, "Merging pieces").
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import divide, initial_state, padded
from batchinfer.kernels.launch import OPTIONS

MAX_WORKSPACE_BYTES = 256 * 2**20


class Partials(NamedTuple):
    """The states of pieces, which kernels take as one argument."""

    out_ptr: torch.Tensor  # [S, Hq, max_pieces, Dv] float32
    max_ptr: torch.Tensor  # [S, Hq, max_pieces] float32
    sum_ptr: torch.Tensor  # [S, Hq, max_pieces] float32

    @classmethod
    def empty(
        cls,
        num_sequences: int,
        num_heads: int,
        max_pieces: int,
        value_width: int,
        device: torch.device,
    ) -> "Partials":
        """Allocate the states, or placeholders if no context has several pieces."""
        shape = (num_sequences, num_heads, max_pieces) if max_pieces > 1 else (1, 1, 1)
        shapes = ((*shape, value_width), shape, shape)
        # Allocate each tensor separately, so that all are aligned. Triton compiles kernels again
        # for unaligned addresses.
        return cls(*(torch.empty(each, dtype=torch.float32, device=device) for each in shapes))


def merge_partials(
    partials: Partials,
    *,
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    out: torch.Tensor,  # [T, Hq, Dv], written in place
    sinks: torch.Tensor | None,  # [Hq]
    window: int | None,
    max_pieces: int,
    piece: int,
    head_groups: int,
    aligned: bool = False,
) -> None:
    """Merge the pieces of every context that has several pieces.

    Args:
        piece: tokens per piece.
        head_groups: number of programs per sequence, each of which merges an equal number of heads.
        aligned: true if contexts were cut by `aligned_pieces` instead of `pieces`.
    """
    num_heads, width = out.shape[1:]
    _merge_kernel[(len(context_lens), head_groups)](
        query_starts,
        context_lens,
        out,
        out.stride(),
        sinks,
        partials,
        window,
        max_pieces,
        GROUP=num_heads // head_groups,
        GROUP_BLOCK=triton.next_power_of_2(num_heads // head_groups),
        WIDTH=width,
        WIDTH_BLOCK=padded(width),
        PIECE=piece,
        ALIGNED=aligned,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit
def pieces(
    context_len,  # [...]
    window,
    max_pieces,
    PIECE: tl.constexpr,
):
    """Return the first position to read, the first piece's first position, and the length and
    number of pieces.

    The first piece begins at a multiple of 128, which every tile size divides. Pieces have PIECE
    tokens, or a multiple of PIECE if max_pieces pieces would not reach the end. A context has at
    least one piece, perhaps empty, because computing a piece writes the output.
    """
    begin = context_len * 0 if window is None else tl.maximum(context_len - window, 0)
    first = begin // 128 * 128
    span = context_len - first
    length = tl.maximum(tl.cdiv(tl.cdiv(span, max_pieces), PIECE), 1) * PIECE
    count = tl.maximum(tl.cdiv(span, length), 1)
    return begin, first, length, count


@triton.jit
def aligned_pieces(
    begin,  # [...] first position
    end,  # [...] one past the last position
    PIECE: tl.constexpr,
):
    """Return the index of the first piece, counted from position 0, and the number of pieces (at
    least 1)."""
    first = begin // PIECE
    return first, tl.maximum(tl.cdiv(end, PIECE) - first, 1)


# Explicit fused multiply-adds make all kernels round in the same way. Joining an empty state does
# not change any bits.
@triton.jit
def join_sums(
    total_max,  # [ROWS] float32: maximum of the previous pieces
    total_sum,  # [ROWS] float32
    piece_max,  # [ROWS] float32
    piece_sum,  # [ROWS] float32
):
    """Return the joined maximum and sum, and the factors for the total's and the piece's output."""
    new_max = tl.maximum(total_max, piece_max)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(total_max - shift)
    weight = tl.exp2(piece_max - shift)
    return new_max, tl.fma(piece_sum, weight, total_sum * decay), decay, weight


@triton.jit
def join_outs(
    total,  # [ROWS, WIDTH] float32
    decay,  # [ROWS] float32
    piece_out,  # [ROWS, WIDTH] float32
    weight,  # [ROWS] float32
):
    return tl.fma(piece_out, tl.broadcast_to(weight[:, None], total.shape), total * decay[:, None])


@triton.jit
def store_partials(
    partials,  # Partials
    rows,  # [ROWS]: (sequence * Hq + head) * max_pieces + piece
    row_max,  # [ROWS] float32
    row_sum,  # [ROWS] float32
    acc,  # [ROWS, WIDTH_BLOCK] float32
    live,  # [ROWS] bool
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    tl.store(partials.max_ptr + rows, row_max, mask=live)
    tl.store(partials.sum_ptr + rows, row_sum, mask=live)
    columns = tl.arange(0, WIDTH_BLOCK)[None, :]
    out_ptrs = partials.out_ptr + rows[:, None] * WIDTH + columns
    tl.store(out_ptrs, acc, mask=live[:, None] & (columns < WIDTH))


@triton.jit(do_not_specialize=["max_pieces"])
def _merge_kernel(
    query_starts_ptr,  # [S + 1] int32
    context_lens_ptr,  # [S] int32
    out_ptr,  # [T, Hq, Dv]
    out_strides,
    sinks_ptr,  # [Hq] or None
    partials,  # Partials
    window,  # or None
    max_pieces,
    GROUP: tl.constexpr,  # heads per program
    GROUP_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    query_row = tl.load(query_starts_ptr + sequence).to(tl.int64)
    if tl.load(query_starts_ptr + sequence + 1) - query_row != 1:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    begin, _, _, count = pieces(context_len, window, max_pieces, PIECE)
    if ALIGNED:
        _, count = aligned_pieces(begin, context_len, PIECE)
    if count == 1:
        return

    rows = tl.arange(0, GROUP_BLOCK)
    live = rows < GROUP
    heads = tl.program_id(1).to(tl.int64) * GROUP + rows
    columns = tl.arange(0, WIDTH_BLOCK)
    mask = live[:, None] & (columns[None, :] < WIDTH)
    first = (sequence * (tl.num_programs(1) * GROUP) + heads) * max_pieces
    total_max, total_sum = initial_state(sinks_ptr, heads, live, GROUP_BLOCK)
    total = tl.zeros([GROUP_BLOCK, WIDTH_BLOCK], tl.float32)
    for piece in range(0, count):
        at = first + piece
        piece_max = tl.load(partials.max_ptr + at, mask=live, other=float("-inf"))
        piece_sum = tl.load(partials.sum_ptr + at, mask=live, other=0.0)
        out_ptrs = partials.out_ptr + at[:, None] * WIDTH + columns[None, :]
        piece_out = tl.load(out_ptrs, mask=mask, other=0.0)
        total_max, total_sum, decay, weight = join_sums(total_max, total_sum, piece_max, piece_sum)
        total = join_outs(total, decay, piece_out, weight)

    out_ptrs = out_ptr + query_row * out_strides[0] + heads[:, None] * out_strides[1]
    result = divide(total, total_sum[:, None])
    tl.store(out_ptrs + columns[None, :] * out_strides[2], result, mask=mask)
