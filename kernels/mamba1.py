"""Weights and a torch reference of Mamba-1's scan, whose recurrent states are in pool slots.

Source: Gu and Dao 2023, https://arxiv.org/abs/2312.00752.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from batchinfer.kernels.recurrent_state import PagedStates


@dataclass(frozen=True)
class Mamba1Weights:
    """Weights of a layer with state size N. Tensors are float32 and contiguous."""

    decay_rate: torch.Tensor
    """[N, channels], positive."""
    skip: torch.Tensor
    """[channels] factor of the values in the output (D)."""


def mamba1(
    values: torch.Tensor,  # [T, channels], after the convolution
    dt: torch.Tensor,  # [T, channels] time steps before softplus, including their bias
    write: torch.Tensor,  # [T, N] input matrices (B)
    read: torch.Tensor,  # [T, N] output matrices (C)
    gate: torch.Tensor,  # [T, channels]
    *,
    weights: Mamba1Weights,
    states: PagedStates,
    out: torch.Tensor,  # [T, channels]
) -> None:
    """Run packed sequences through the scan and the gate of a layer, and update their states in
    place. The state of a new sequence is zero.

    For each channel, with a state m [N] and value x:
    ``m = exp(-decay_rate dt) m + B (dt x); out = (C^T m + skip x) silu(gate)``.
    """
    shape = 1, *weights.decay_rate.shape
    rate, skip = weights.decay_rate.double(), weights.skip.double()
    for table, rows, zeros in states.sequences():
        matrix = states.matrices(table, shape, zeros)[0]
        value, step = values[rows].double(), functional.softplus(dt[rows].double())
        outs = []
        for t, at in enumerate(range(rows.start, rows.stop)):
            matrix *= torch.exp(-rate * step[t])
            matrix += write[at].double()[:, None] * (step[t] * value[t])
            outs.append(read[at].double() @ matrix)
        result = (torch.stack(outs) + skip * value) * functional.silu(gate[rows].double())
        out[rows] = result.to(out.dtype)
        states.write_matrices(table, matrix[None])
