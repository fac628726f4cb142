"""Quantize rows to float8 e4m3fn at run time, with a scale for every 128 columns.

Formula, for a row's group g of 128 columns, the last one shorter where need be:

    largest = max(1e-10, max_k |x[t, k]|)
    scales[g, t] = largest / 448          codes[t, k] = round(x[t, k] * (448 / largest))

in float32, to nearest and ties to even, divisions rounded as IEEE 754 has it. A group that holds
NaN or infinity gets NaN for its scale, so that all products with its row are NaN.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2 (`activation_scheme: dynamic` of such
checkpoints); the bound below is vLLM's (`per_token_group_quant_fp8`).
"""

import torch
import triton
import triton.language as tl

from batchinfer.kernels.fp8 import FP8, as_readable, narrow
from batchinfer.kernels.fp8_blocks import BLOCK, LEAST, MOST, num_blocks
from batchinfer.kernels.launch import OPTIONS, check_launchable

_GROUPS = 8  # of a row, that a program takes: 16 bytes a thread and load, twice


def quantize_groups(
    x: torch.Tensor,  # [T, K] any float, last dimension contiguous
    *,
    codes: torch.Tensor,  # [T, K] float8, contiguous
    scales: torch.Tensor,  # [G, T] float32, contiguous
) -> None:
    """Write rows as float8 and the scales of their groups."""
    check_launchable("quantize_groups", x, codes, scales)
    num_rows, width = x.shape
    if codes.dtype != FP8 or scales.shape != (num_blocks(width), num_rows):
        raise ValueError(
            f"quantize_groups: codes of {codes.dtype} and scales {list(scales.shape)} for rows "
            f"{list(x.shape)}; float8_e4m3fn and {[num_blocks(width), num_rows]} belong to them"
        )
    if x.stride(1) != 1 or codes.shape != x.shape or not codes.is_contiguous():
        raise ValueError(f"quantize_groups: rows by {x.stride()} and codes of {list(codes.shape)}")
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
    codes_ptr,  # [T, K] float8, or uint8 that stands for it
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
    there = columns < WIDTH
    x = tl.load(x_ptr + row * x_stride + columns, mask=there, other=0.0).to(tl.float32)
    size = tl.abs(x)
    # A maximum ignores NaN: what is not finite is found separately.
    unlike = tl.max((size < float("inf")).to(tl.int32) ^ 1, 1)
    largest = tl.maximum(tl.max(size, 1), LEAST)
    largest = tl.where(unlike == 0, largest, float("nan"))
    up = tl.div_rn(MOST + tl.zeros_like(largest), largest)
    codes = narrow(x * up[:, None], codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * WIDTH + columns, codes, mask=there)
    scales_ptrs = scales_ptr + groups.to(tl.int64) * num_rows + row
    scales = tl.div_rn(largest, MOST + tl.zeros_like(largest))
    tl.store(scales_ptrs, scales, mask=groups * BLOCK < WIDTH)
