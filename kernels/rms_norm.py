"""Computes root mean square normalization (Zhang & Sennrich 2019, arXiv:1910.07467).

Formula, for every row:

    out = x / sqrt(mean(x^2) + eps) * (offset + weight)

where x is first centered, x - mean(x), if the norm is that of Cohere's models; computed in float32
and rounded to the dtype of `out` once. One program normalizes one row.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable, warps_for


def rms_norm(
    x: torch.Tensor,  # [N, W], last dimension contiguous
    weight: torch.Tensor,  # [W]
    *,
    eps: float,
    offset: float = 0.0,
    centered: bool = False,
    out: torch.Tensor,  # [N, W], contiguous
) -> None:
    check_launchable("rms_norm", x, weight, out)
    num_rows, width = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x,
        weight,
        out,
        x.stride(0),
        eps,
        OFFSET=offset,
        CENTERED=centered,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_for(block),
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["eps"])
def _rms_norm_kernel(
    x_ptr,  # [N, W]
    weight_ptr,  # [W]
    out_ptr,  # [N, W]
    x_row_stride,
    eps,
    OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(mask, x - tl.sum(x) / WIDTH, 0.0)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + columns, x * inverse * (OFFSET + weight), mask=mask)
