"""Weights and a torch reference of a causal convolution whose state is in pool slots."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from batchinfer.kernels.recurrent_state import PagedStates


@dataclass(frozen=True)
class CausalConvWeights:
    """Weights of a depthwise convolution. Tensors are float32 and contiguous."""

    conv: torch.Tensor
    """[conv_width, channels]"""
    bias: torch.Tensor | None
    """[channels]"""
    silu: bool
    """True if SiLU follows the convolution."""


def causal_conv(
    inputs: torch.Tensor,  # [T, channels]
    before: torch.Tensor | None = None,  # [T, channels]; multiplies the inputs
    after: torch.Tensor | None = None,  # [T, channels]; multiplies the outputs
    *,
    weights: CausalConvWeights,
    states: PagedStates,
    out: torch.Tensor,  # [T, channels]
) -> None:
    """Convolve packed sequences, and update their states in place. A state holds a sequence's last
    inputs, multiplied by ``before``. Inputs before the first token are 0."""
    for table, rows, zeros in states.sequences():
        x = inputs[rows].double()
        if before is not None:
            x *= before[rows].double()
        y = states.convolve(table, x, weights.conv, weights.bias, zeros)
        if weights.silu:
            y = functional.silu(y)
        out[rows] = (y if after is None else y * after[rows].double()).to(out.dtype)
