"""Weights in float8 e4m3fn with a scale for every block of 128 x 128.

As DeepSeek-V3 and Qwen3's FP8 checkpoints have them (`weight` and `weight_scale_inv`, with
`weight_block_size` [128, 128]): DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2. In torch, since
a weight is quantized once.
"""

import torch

from batchinfer.kernels.fp8 import FP8

BLOCK = 128
"""Rows and columns of a weight that share a scale."""
MOST = 448.0
"""The largest number of the format."""
LEAST = 1e-10
"""The least that a block's largest number counts as, so that its scale is not zero. The same as
vLLM's (`per_token_group_quant_fp8`)."""


def num_blocks(size: int) -> int:
    """Blocks along `size` rows or columns; the last one may be shorter."""
    return -(-size // BLOCK)


def quantize_blocks(
    weight: torch.Tensor,  # [N, K] any float
) -> tuple[torch.Tensor, torch.Tensor]:  # [N, K] float8, [ceil(N / 128), ceil(K / 128)] float32
    """Round a weight to float8, to nearest and ties to even: a block's largest becomes 448.

    A block that holds NaN or infinity gets NaN for its scale.
    """
    codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = weight.new_empty(*map(num_blocks, weight.shape), dtype=torch.float32)
    # A row of blocks at a time: the whole weight in float32 would take four times its room.
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
    """Scales of blocks or groups with such largest numbers, and what takes a number to its code."""
    largest = largest.clamp_min(LEAST)
    largest = largest.where(largest.isfinite(), torch.nan)
    # Torch divides by a tensor; for a Python number it multiplies by the reciprocal.
    most = torch.full_like(largest, MOST)
    return largest / most, most / largest


def dequantize_blocks(
    codes: torch.Tensor,  # [N, K] float8
    scales: torch.Tensor,  # [ceil(N / 128), ceil(K / 128)] float32
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [N, K]
    """The numbers that the codes represent: exact products, rounded to `dtype` once."""
    rows, columns = codes.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.double() * spread).to(dtype)


def check_blocks(name: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise ValueError unless scales have the shape and dtype for these codes."""
    expected = tuple(map(num_blocks, codes.shape))
    if codes.dtype != FP8 or scales.dtype != torch.float32 or tuple(scales.shape) != expected:
        raise ValueError(
            f"{name}: a weight {list(codes.shape)} of {codes.dtype} with scales "
            f"{list(scales.shape)} of {scales.dtype}; scales of {list(expected)} in float32 belong "
            "to one of float8_e4m3fn"
        )
