"""Computes the gated RMSNorm after a recurrence.

Formula, for groups of `width` elements:

    out = x / sqrt(mean(x^2) + eps) * weight * silu(gate)

computed in float32, and rounded to the dtype of `out` once. Without `with_silu`, the last factor is
`sigmoid(gate)`. With `gate_first`, `x` is multiplied by `silu(gate)` before the norm. Without
`weight` there is no norm.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.launch import OPTIONS, check_launchable, warps_for


def gated_norm(
    x: torch.Tensor,  # [T, W] float32, contiguous
    gate: torch.Tensor,  # [T, W], last dimension contiguous
    weight: torch.Tensor | None,  # [W] or [width] float32
    *,
    width: int,
    eps: float,
    gate_first: bool = False,
    with_silu: bool = True,
    out: torch.Tensor,  # [T, W], contiguous
) -> None:
    """Write the gated norm of every row to `out`.

    Args:
        width: number of elements that are normalized together, a divisor of W.
        weight: one weight for each element of a row, or for each element of a group.
    """
    check_launchable("gated_norm", x, gate, weight, out)
    num_tokens, num_values = x.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(width)
    _gated_norm_kernel[(num_tokens, num_values // width)](
        *(x, gate, weight, out, gate.stride(0), eps),
        NUM_VALUES=num_values,
        WIDTH=width,
        WEIGHT_STRIDE=width if weight is not None and len(weight) > width else 0,
        HAS_NORM=weight is not None,
        GATE_FIRST=gate_first,
        WITH_SILU=with_silu,
        BLOCK=block,
        num_warps=warps_for(block),
        **OPTIONS,
    )


@triton.jit
def _gated_norm_kernel(
    x_ptr,  # [T, NUM_VALUES]
    gate_ptr,  # [T, NUM_VALUES]
    weight_ptr,  # [NUM_VALUES] or [WIDTH]
    out_ptr,  # [T, NUM_VALUES]
    gate_stride,
    eps,
    NUM_VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WITH_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and group."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    mask = within < WIDTH
    columns = group * WIDTH + within
    x = tl.load(x_ptr + token * NUM_VALUES + columns, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = gate * tl.sigmoid(gate) if WITH_SILU else tl.sigmoid(gate)
    if GATE_FIRST:
        x *= gate
    if HAS_NORM:
        mean = tl.sum(x * x, axis=0) / WIDTH
        weight = tl.load(weight_ptr + group * WEIGHT_STRIDE + within, mask=mask, other=0.0)
        x = x / tl.sqrt(mean + eps) * weight
    if not GATE_FIRST:
        x *= gate
    tl.store(out_ptr + token * NUM_VALUES + columns, x, mask=mask)
