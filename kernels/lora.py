"""Computes LoRA for batches with several adapters: adds each adapter's product to its rows.

Formula, for every adapter a and every i in [starts[a], starts[a + 1]), with t = rows[i]:

    lowered[i, :] = sum_k down[a, :, k] x[t, k]             (`lora_shrink`)
    out[t, n]    += sum_r up[a, n, r] lowered[i, r]         (`lora_expand`)

Rows of one adapter are adjacent in `rows`. A program computes a tile of an adapter's rows, and
reads the adapter's factors once for the whole tile. `starts` is read on the device, so that one
captured launch works for all mixtures of adapters.

Accumulation: in float32. A row's sum over k is cut into pieces of `SPLIT` elements, which are added
in order. `lowered` is rounded to the dtype of x between the two GEMMs. The result is added to `out`
in float32 and rounded once. Pieces and tiles have constant sizes, so a row's bits do not depend on
other rows.

Sources: Hu et al. 2021 (arXiv:2106.09685); rows are gathered per adapter as in Punica's SGMV (Chen
et al. 2023, arXiv:2310.18547).
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.attention_loop import padded
from batchinfer.kernels.launch import OPTIONS, check_launchable

SPLIT = 1024
"""Number of elements of x that one program of `lora_shrink` sums."""

_TOKENS = 32  # rows per tile
_RANKS = 64  # ranks per tile, at most
_WIDTH = 64  # columns per tile


def num_splits(width: int) -> int:
    return -(-width // SPLIT)


def lora_shrink(
    x: torch.Tensor,  # [T, W], last dimension contiguous
    down: torch.Tensor,  # [A, R, W], contiguous
    rows: torch.Tensor,  # [N] int64, indices into x
    starts: torch.Tensor,  # [B + 1] int32, ascending, at most N; adapters from A on are skipped
    *,
    lowered: torch.Tensor,  # [num_splits(W), N, R] float32, contiguous
) -> None:
    """Multiply each row by its adapter's first factor, and write each piece's sums to `lowered`."""
    check_launchable("lora_shrink", x, down, rows, starts, lowered)
    ranks, width = down.shape[1:]
    adapters = _num_used(starts, down)
    if len(rows) == 0:
        return
    ranks_block = _block(ranks)
    grid = (_num_tiles(rows, adapters), triton.cdiv(ranks, ranks_block), num_splits(width))
    _lora_shrink_kernel[grid](
        x,
        down,
        rows,
        starts,
        lowered,
        x.stride(0),
        len(rows),
        adapters,
        RANKS=ranks,
        WIDTH=width,
        SPLIT=SPLIT,
        TOKENS=_TOKENS,
        RANKS_BLOCK=ranks_block,
        WIDTH_BLOCK=_WIDTH,
        num_warps=4,
        num_stages=3,
        **OPTIONS,
    )


def lora_expand(
    lowered: torch.Tensor,  # [P, N, R] float32, last dimension contiguous: pieces
    up: torch.Tensor,  # [A, M, R], contiguous
    rows: torch.Tensor,  # [N] int64, indices into out
    starts: torch.Tensor,  # [B + 1] int32, ascending, at most N; adapters from A on are skipped
    *,
    out: torch.Tensor,  # [T, M], last dimension contiguous, changed in place
) -> None:
    """Add up the pieces of `lowered`, multiply each row by its adapter's second factor, and add the
    product to `out`."""
    check_launchable("lora_expand", lowered, up, rows, starts, out)
    width, ranks = up.shape[1:]
    adapters = _num_used(starts, up)
    if len(rows) == 0:
        return
    _lora_expand_kernel[_num_tiles(rows, adapters), triton.cdiv(width, _WIDTH)](
        lowered,
        up,
        rows,
        starts,
        out,
        *lowered.stride()[:2],
        out.stride(0),
        adapters,
        PIECES=len(lowered),
        RANKS=ranks,
        WIDTH=width,
        TOKENS=_TOKENS,
        RANKS_BLOCK=_block(ranks),
        WIDTH_BLOCK=_WIDTH,
        num_warps=4,
        **OPTIONS,
    )


def _block(ranks: int) -> int:
    return min(_RANKS, padded(ranks))


def _num_used(starts: torch.Tensor, factors: torch.Tensor) -> int:
    """Return the number of adapters that have factors and may have rows."""
    return min(len(starts) - 1, len(factors))


def _num_tiles(rows: torch.Tensor, adapters: int) -> int:
    """Return an upper bound on the number of tiles that holds for all values of `starts`."""
    return len(rows) // _TOKENS + adapters


@triton.jit
def _rows_of_tile(
    starts_ptr,  # [A + 1] int32
    index,  # index of the tile
    num_adapters,
    TOKENS: tl.constexpr,
):  # the tile's adapter, indices into `rows`, and a mask of the indices that are used
    # The tiles of adapter a begin at index starts[a] // TOKENS + a and end before the first tile of
    # adapter a + 1. These tiles are always enough for the adapter's rows.
    low = tl.full([], 0, tl.int32)
    high = num_adapters - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts_ptr + middle) // TOKENS + middle <= index:
            low = middle
        else:
            high = middle - 1
    start = tl.load(starts_ptr + low)
    stop = tl.load(starts_ptr + low + 1)
    places = start + (index - start // TOKENS - low) * TOKENS + tl.arange(0, TOKENS)
    return low.to(tl.int64), places, (places >= start) & (places < stop)


@triton.jit(do_not_specialize=["num_rows", "num_adapters"])
def _lora_shrink_kernel(
    x_ptr,  # [T, W]
    down_ptr,  # [A, R, W]
    rows_ptr,  # [N] int64
    starts_ptr,  # [A + 1] int32
    lowered_ptr,  # [P, N, R] float32
    x_stride,
    num_rows,
    num_adapters,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    adapter, places, live = _rows_of_tile(starts_ptr, tl.program_id(0), num_adapters, TOKENS)
    if tl.sum(live.to(tl.int32)) == 0:
        return
    ranks = tl.program_id(1) * RANKS_BLOCK + tl.arange(0, RANKS_BLOCK)
    piece = tl.program_id(2)
    rows = tl.load(rows_ptr + places, mask=live, other=0)
    x_ptrs = x_ptr + rows[:, None] * x_stride
    down_ptrs = down_ptr + (adapter * RANKS + ranks)[:, None] * WIDTH
    acc = tl.zeros([TOKENS, RANKS_BLOCK], tl.float32)
    for first in range(piece * SPLIT, min(piece * SPLIT + SPLIT, WIDTH), WIDTH_BLOCK):
        columns = (first + tl.arange(0, WIDTH_BLOCK))[None, :]
        x = tl.load(x_ptrs + columns, mask=live[:, None] & (columns < WIDTH), other=0.0)
        in_range = (ranks[:, None] < RANKS) & (columns < WIDTH)
        down = tl.load(down_ptrs + columns, mask=in_range, other=0.0)
        acc = tl.dot(x, tl.trans(down), acc, input_precision="ieee")
    at = (piece.to(tl.int64) * num_rows + places)[:, None] * RANKS + ranks[None, :]
    tl.store(lowered_ptr + at, acc, mask=live[:, None] & (ranks[None, :] < RANKS))


@triton.jit(do_not_specialize=["num_adapters"])
def _lora_expand_kernel(
    lowered_ptr,  # [P, N, R] float32
    up_ptr,  # [A, M, R]
    rows_ptr,  # [N] int64
    starts_ptr,  # [A + 1] int32
    out_ptr,  # [T, M]
    piece_stride,
    row_stride,
    out_stride,
    num_adapters,
    PIECES: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    adapter, places, live = _rows_of_tile(starts_ptr, tl.program_id(0), num_adapters, TOKENS)
    if tl.sum(live.to(tl.int32)) == 0:
        return
    columns = tl.program_id(1) * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK)
    rows = tl.load(rows_ptr + places, mask=live, other=0)
    acc = tl.zeros([TOKENS, WIDTH_BLOCK], tl.float32)
    for first in range(0, RANKS, RANKS_BLOCK):
        ranks = first + tl.arange(0, RANKS_BLOCK)
        in_range = live[:, None] & (ranks[None, :] < RANKS)
        lowered_ptrs = lowered_ptr + places.to(tl.int64)[:, None] * row_stride + ranks[None, :]
        lowered = tl.zeros([TOKENS, RANKS_BLOCK], tl.float32)
        for _ in range(PIECES):
            lowered += tl.load(lowered_ptrs, mask=in_range, other=0.0)
            lowered_ptrs += piece_stride
        up_ptrs = up_ptr + (adapter * WIDTH + columns)[:, None] * RANKS + ranks[None, :]
        in_range = (columns[:, None] < WIDTH) & (ranks[None, :] < RANKS)
        up = tl.load(up_ptrs, mask=in_range, other=0.0)
        acc = tl.dot(lowered.to(up.dtype), tl.trans(up), acc, input_precision="ieee")
    out_ptrs = out_ptr + rows[:, None] * out_stride + columns[None, :]
    in_range = live[:, None] & (columns[None, :] < WIDTH)
    out = tl.load(out_ptrs, mask=in_range, other=0.0).to(tl.float32)
    tl.store(out_ptrs, out + acc, mask=in_range)
