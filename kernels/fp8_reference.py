"""Twins in plain torch of the kernels of float8 products: they define what is correct."""

import torch

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.fp8_blocks import BLOCK, MOST, dequantize_blocks, num_blocks, scales_of


def quantize_groups(
    x: torch.Tensor,  # [T, K] any float
    *,
    codes: torch.Tensor,  # [T, K] float8
    scales: torch.Tensor,  # [G, T] float32
) -> None:
    """Write rows as float8 and the scales of their groups of 128 columns, group after group."""
    for group in range(num_blocks(x.shape[1])):
        columns = slice(group * BLOCK, (group + 1) * BLOCK)
        numbers = x[:, columns].float()
        scales[group], up = scales_of(numbers.abs().amax(1))
        codes[:, columns] = (numbers * up[:, None]).clamp(-MOST, MOST).to(FP8)


def fp8_linear(
    x: torch.Tensor,  # [T, K]; float8 with scales
    weight: torch.Tensor,  # [N, K] float8
    weight_scales: torch.Tensor,  # [ceil(N / 128), G] float32
    *,
    out: torch.Tensor,  # [T, N]
    x_scales: torch.Tensor | None = None,  # [G, T] float32
    bias: torch.Tensor | None = None,  # [N]
    adds: bool = False,
    pieces: int | None = None,
) -> None:
    """Write, or add, rows times a weight's transpose, of the numbers that both stand for."""
    del pieces  # tells the kernel how to launch
    rows = x.double()
    if x_scales is not None:
        rows = rows * x_scales.T.double().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    product = rows @ dequantize_blocks(weight, weight_scales, torch.float64).T
    if bias is not None:
        product += bias.double()
    out.copy_(out.double() + product if adds else product)
