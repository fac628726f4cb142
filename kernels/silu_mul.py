"""Computes the activation of a SwiGLU layer (Shazeer 2020, arXiv:2002.05202).

Formula, for rows whose first half is the gate and whose second half is up:

    out = gate * sigmoid(gate) * up

computed in float32, and rounded to the dtype of `out` once.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable

_BLOCK = 1024


def silu_mul(
    gate_up: torch.Tensor,  # [N, 2 * W], last dimension contiguous
    *,
    out: torch.Tensor,  # [N, W], contiguous
) -> None:
    check_launchable("silu_mul", gate_up, out)
    num_rows, width = out.shape
    if num_rows == 0:
        return
    _silu_mul_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        WIDTH=width,
        BLOCK=_BLOCK,
        **OPTIONS,
    )


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [N, 2 * W]
    out_ptr,  # [N, W]
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_up_ptr += row * row_stride + columns
    gate = tl.load(gate_up_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, gate * tl.sigmoid(gate) * up, mask=mask)
