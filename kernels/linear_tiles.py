"""Parts that kernels of linear layers share: the order of tiles, and sums that are divided into
pieces."""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS

FEW_ROWS = 64
"""Up to this number of rows, reading the weights takes most of the time."""
GROUPED = 8
"""Number of row tiles that read the same tile of a weight one after the other, so that this tile
stays in the L2 cache."""
_LEAST = 2  # smallest number of blocks per piece
_SUMMED = 1024  # outputs per program of the kernel that adds pieces


def even_pieces(blocks: int, wanted: int) -> int:
    """Divide the blocks of a sum evenly into at most `wanted` pieces, and return the number of
    pieces."""
    most = max(1, min(wanted, blocks // _LEAST))
    return int(triton.cdiv(blocks, triton.cdiv(blocks, most)))


def sum_pieces(
    pieces: torch.Tensor,  # [P, T, N] float32, contiguous
    bias: torch.Tensor | None,  # [N]
    out: torch.Tensor,  # [T, N], contiguous
    *,
    adds: bool,
) -> None:
    """Write the sum of pieces and bias to `out`, or add it to `out`. The order of additions is
    fixed."""
    num_pieces, num_rows, outputs = pieces.shape
    _sum_pieces_kernel[(num_rows, triton.cdiv(outputs, _SUMMED))](
        pieces,
        bias,
        out,
        num_rows,
        num_pieces,
        OUTPUTS=outputs,
        ADDS=adds,
        BLOCK=_SUMMED,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit
def place_tile(
    num_rows,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
):
    # Programs that run at the same time compute GROUPED tiles of rows for the same tiles of the
    # weight, so that the rows and the weight stay in the L2 cache.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    output_tiles: tl.constexpr = (OUTPUTS + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    group = program // (GROUPED * output_tiles)
    first = group * GROUPED
    size = tl.minimum(row_tiles - first, GROUPED)
    within = program % (GROUPED * output_tiles)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["num_rows", "num_pieces"])
def _sum_pieces_kernel(
    pieces_ptr,  # [P, T, N] float32
    bias_ptr,  # [N], or None
    out_ptr,  # [T, N]
    num_rows,
    num_pieces,
    OUTPUTS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = outputs < OUTPUTS
    ptrs = pieces_ptr + row * OUTPUTS + outputs
    acc = tl.load(ptrs, mask=in_range, other=0.0)
    for _ in range(1, num_pieces):
        ptrs += num_rows.to(tl.int64) * OUTPUTS
        acc += tl.load(ptrs, mask=in_range, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + outputs, mask=in_range, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row * OUTPUTS + outputs
    if ADDS:
        acc += tl.load(out_ptrs, mask=in_range, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc, mask=in_range)
