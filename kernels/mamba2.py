"""Weights and a torch reference of Mamba-2, whose recurrent states are in pool slots.

Source: Dao and Gu 2024, https://arxiv.org/abs/2405.21060.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from batchinfer.kernels.recurrent_state import PagedStates


@dataclass(frozen=True)
class Mamba2Weights:
    """Weights and constants of a layer with H heads of width P, G groups and state size N.

    Tensors are float32 and contiguous.
    """

    conv: torch.Tensor
    """[conv_width, channels]; channels are the values of all heads (H * P), then the input
    matrices B and the output matrices C of all groups (G * N each)."""
    conv_bias: torch.Tensor | None
    """[channels]"""
    decay_rate: torch.Tensor
    """[H], positive."""
    dt_bias: torch.Tensor
    """[H]"""
    skip: torch.Tensor
    """[H] factor of the values in the output (D)."""
    norm: torch.Tensor | None
    """[H * P] weight of the gated norm; None: the output is only gated."""
    norm_eps: float
    norm_width: int
    gate_first: bool
    num_groups: int
    state_size: int
    dt_limits: tuple[float, float]


def mamba2(
    values: torch.Tensor,  # [T, channels]
    gate: torch.Tensor,  # [T, H * P]
    dt: torch.Tensor,  # [T, H]
    *,
    weights: Mamba2Weights,
    states: PagedStates,
    out: torch.Tensor,  # [T, H * P]
) -> None:
    """Run packed sequences through a layer, from the convolution to the gated norm, and update
    their states in place. The state of a new sequence is zero.

    For each head, with a state M [N, P], value x, and its group's B and C [N]:
    ``M = exp(-decay_rate dt) M + B (dt x); y = C^T M + skip x; out = norm(y silu(gate))``.
    """
    heads = dt.shape[1]
    width, size = out.shape[1] // heads, weights.state_size
    step = functional.softplus(dt.double() + weights.dt_bias.double()).clamp(*weights.dt_limits)
    kept = torch.exp(-weights.decay_rate.double() * step)
    for table, rows, zeros in states.sequences():
        matrices = states.matrices(table, (heads, size, width), zeros)
        mixed = states.convolve(table, values[rows], weights.conv, weights.conv_bias, zeros)
        value, write, read = torch.split(
            functional.silu(mixed), [heads * width, *2 * [weights.num_groups * size]], dim=1
        )
        value = value.reshape(len(value), heads, width)
        write, read = (
            part.reshape(len(part), -1, size).repeat_interleave(heads // weights.num_groups, dim=1)
            for part in (write, read)
        )
        outs = []
        for t, at in enumerate(range(rows.start, rows.stop)):
            matrices *= kept[at, :, None, None]
            matrices += write[t, :, :, None] * (step[at, :, None] * value[t])[:, None]
            outs.append(torch.einsum("hn,hnp->hp", read[t], matrices))
        result = torch.stack(outs) + weights.skip.double()[:, None] * value
        out[rows] = _gated_norm(result.flatten(1), gate[rows].double(), weights).to(out.dtype)
        states.write_matrices(table, matrices)


def _gated_norm(x: torch.Tensor, gate: torch.Tensor, weights: Mamba2Weights) -> torch.Tensor:
    gate = functional.silu(gate)
    if weights.norm is None:
        return x * gate
    if weights.gate_first:
        x = x * gate
    groups = x.reshape(len(x), -1, weights.norm_width)
    mean = groups.square().mean(-1, keepdim=True)
    x = (groups / (mean + weights.norm_eps).sqrt()).flatten(1) * weights.norm.double()
    return x if weights.gate_first else x * gate
