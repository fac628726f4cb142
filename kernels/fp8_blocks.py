"""Quantizes to float8 e4m3fn: weights in 128 x 128 blocks, rows in groups of 128 columns.

This is the format of DeepSeek-V3's and Qwen3's FP8 checkpoints (`weight_scale_inv`,
`weight_block_size` [128, 128], `activation_scheme: dynamic`): DeepSeek-AI 2024, arXiv:2412.19437,
section 3.3.2. The lower bound of scales is the same as in vLLM's `per_token_group_quant_fp8`.

Weights are quantized once, in torch. Rows are quantized in every step, by a Triton kernel. Formula,
for a row's group g of 128 columns (the last group may be shorter):

    largest = max(1e-10, max_k |x[t, k]|)
    scales[g, t] = largest / 448          codes[t, k] = round(x[t, k] * (448 / largest))

computed in float32 with IEEE 754 divisions. Rounding is to nearest, ties to even. A group with NaN
or infinity gets a NaN scale, so that all outputs of its row are NaN.
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import FP8, as_readable, narrow
from batchinfer.kernels.launch import OPTIONS, check_launchable

BLOCK = 128
"""Number of rows, and of columns, in a block of a weight. All elements of a block share one
scale."""
MOST = 448.0
"""The largest float8 e4m3fn number."""
LEAST = 1e-10
"""Lower bound for a block's largest magnitude, so that no scale is zero."""
_GROUPS = 8  # number of a row's groups that one program quantizes


def num_blocks(size: int) -> int:
    """Return the number of blocks along `size` rows or columns. The last block may be shorter."""
    return -(-size // BLOCK)


def quantize_blocks(
    weight: torch.Tensor,  # [N, K] any float
) -> tuple[torch.Tensor, torch.Tensor]:  # [N, K] float8, [ceil(N / 128), ceil(K / 128)] float32
    """Quantize a weight to float8, scaled so that each block's largest magnitude becomes 448.

    A block with NaN or infinity gets a NaN scale.
    """
    codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = weight.new_empty(*map(num_blocks, weight.shape), dtype=torch.float32)
    # Quantize one row of blocks at a time, because the whole weight in float32 would take four
    # times as much memory as the codes.
    columns = num_blocks(weight.shape[1])
    for row in range(len(scales)):
        rows = slice(row * BLOCK, (row + 1) * BLOCK)
        numbers = weight[rows].float()
        padded = numbers.new_zeros(len(numbers), columns * BLOCK)
        padded[:, : weight.shape[1]] = numbers
        scales[row], up = scales_of(padded.view(-1, columns, BLOCK).abs().amax((0, 2)))
        up = up.repeat_interleave(BLOCK)[: weight.shape[1]]
        codes[rows] = (numbers * up).clamp(-MOST, MOST).to(FP8)
    return codes, scales


def scales_of(
    largest: torch.Tensor,  # [...] float32
) -> tuple[torch.Tensor, torch.Tensor]:  # [...] float32 each
    """Return the scales of blocks or groups with these largest magnitudes, and the scales'
    inverses."""
    largest = largest.clamp_min(LEAST)
    largest = largest.where(largest.isfinite(), torch.nan)
    # Divide by a tensor, because torch replaces a division by a Python number with a multiplication
    # by the number's reciprocal.
    most = torch.full_like(largest, MOST)
    return largest / most, most / largest


def dequantize_blocks(
    codes: torch.Tensor,  # [N, K] float8
    scales: torch.Tensor,  # [ceil(N / 128), ceil(K / 128)] float32
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [N, K]
    """Return codes times scales, rounded to `dtype` once."""
    rows, columns = codes.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.double() * spread).to(dtype)


def check_blocks(name: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise ValueError if codes are not float8, or scales do not match the codes' shape."""
    expected = tuple(map(num_blocks, codes.shape))
    if codes.dtype != FP8 or scales.dtype != torch.float32 or tuple(scales.shape) != expected:
        raise ValueError(
            f"{name}: the weight is {list(codes.shape)} of {codes.dtype} and its scales are "
            f"{list(scales.shape)} of {scales.dtype}; expected float8_e4m3fn and scales "
            f"{list(expected)} of float32"
        )


def quantize_groups(
    x: torch.Tensor,  # [T, K] any float, last dimension contiguous
    *,
    codes: torch.Tensor,  # [T, K] float8, contiguous
    scales: torch.Tensor,  # [G, T] float32, contiguous
) -> None:
    check_launchable("quantize_groups", x, codes, scales)
    num_rows, width = x.shape
    if codes.dtype != FP8 or scales.shape != (num_blocks(width), num_rows):
        raise ValueError(
            f"quantize_groups: for rows {list(x.shape)}, codes are {codes.dtype} and scales "
            f"{list(scales.shape)}; expected float8_e4m3fn and {[num_blocks(width), num_rows]}"
        )
    if x.stride(1) != 1 or codes.shape != x.shape or not codes.is_contiguous():
        raise ValueError(
            f"quantize_groups: x is {list(x.shape)} with strides {x.stride()}, codes are "
            f"{list(codes.shape)} with strides {codes.stride()}; codes must have the shape of x "
            "and be contiguous, and each row of x must be contiguous"
        )
    if num_rows == 0:
        return
    _quantize_groups_kernel[(num_rows, triton.cdiv(num_blocks(width), _GROUPS))](
        x,
        as_readable(codes),
        scales,
        x.stride(0),
        num_rows,
        WIDTH=width,
        BLOCK=BLOCK,
        GROUPS=_GROUPS,
        MOST=MOST,
        LEAST=LEAST,
        num_warps=4,
        **OPTIONS,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_groups_kernel(
    x_ptr,  # [T, K]
    codes_ptr,  # [T, K] float8, or float8 viewed as uint8
    scales_ptr,  # [G, T] float32
    x_stride,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_range = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=in_range, other=0.0).to(tl.float32)
    size = tl.abs(x)
    # Look for NaN and infinity separately, because tl.max ignores NaN.
    nonfinite = tl.max((size < float("inf")).to(tl.int32) ^ 1, 1)
    largest = tl.maximum(tl.max(size, 1), LEAST)
    largest = tl.where(nonfinite == 0, largest, float("nan"))
    up = tl.div_rn(MOST + tl.zeros_like(largest), largest)
    codes = narrow(x * up[:, None], codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * WIDTH + columns, codes, mask=in_range)
    scales_ptrs = scales_ptr + groups.to(tl.int64) * num_rows + row
    scales = tl.div_rn(largest, MOST + tl.zeros_like(largest))
    tl.store(scales_ptrs, scales, mask=groups * BLOCK < WIDTH)
