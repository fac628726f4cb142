"""Weights and a torch reference of Gated DeltaNet and Kimi Delta Attention, whose recurrent states
are in pool slots.

Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464) has one decay for each head.
Kimi Delta Attention (Kimi Team 2025, https://arxiv.org/abs/2510.26692) has one decay for each row
of a head's matrix.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from batchinfer.kernels.recurrent_state import PagedStates


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Weights and constants of a layer. Tensors are float32 and contiguous."""

    conv: torch.Tensor
    """[conv_width, channels]; channels are the queries and keys of all key heads, then values."""
    decay_rate: torch.Tensor
    """[Hv], positive."""
    dt_bias: torch.Tensor
    """[Hv * decay_width]"""
    norm: torch.Tensor
    """[Dv]"""
    norm_eps: float
    max_beta: float
    """Largest write strength beta: 1, or 2 if states may change sign."""
    num_key_heads: int
    key_width: int
    with_silu: bool = True
    """True to multiply the output by silu(gate), false to multiply it by sigmoid(gate)."""

    @property
    def decay_width(self) -> int:
        """Number of decays per head: 1, or Dk if each row of the head's matrix has a decay."""
        return len(self.dt_bias) // len(self.decay_rate)


def gated_delta(
    qkv: torch.Tensor,  # [T, channels]
    gate: torch.Tensor,  # [T, Hv * Dv]
    decay: torch.Tensor,  # [T, Hv * decay_width]
    beta: torch.Tensor,  # [T, Hv]
    *,
    weights: GatedDeltaWeights,
    states: PagedStates,
    out: torch.Tensor,  # [T, Hv * Dv]
) -> None:
    """Run packed sequences through a layer, from the convolution to the gated norm, and update
    their states in place. The state of a new sequence is zero.

    For each value head, with a state M [Dk, Dv], decay g, unit query q and key k, value v:
    ``M = diag(g) M; M += k (beta (v - k^T M)); out = norm(q^T M) * silu(gate)``.
    """
    shape = beta.shape[1], weights.key_width, len(weights.norm)
    for table, rows, zeros in states.sequences():
        matrices = states.matrices(table, shape, zeros)
        mixed = states.convolve(table, qkv[rows], weights.conv, None, zeros)
        out[rows] = _recur(
            functional.silu(mixed), gate[rows], decay[rows], beta[rows], matrices, weights
        )
        states.write_matrices(table, matrices)


def _recur(
    mixed: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    matrices: torch.Tensor,  # [Hv, Dk, Dv] updated in place
    weights: GatedDeltaWeights,
) -> torch.Tensor:
    num_keys = weights.num_key_heads * weights.key_width
    num_heads, key_width, value_width = matrices.shape
    query, key, value = torch.split(mixed, [num_keys, num_keys, num_heads * value_width], dim=1)
    per_key = num_heads // weights.num_key_heads
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(per_key, dim=1)
        for x in (part.reshape(len(part), -1, key_width) for part in (query, key))
    )
    query, value = query * key_width**-0.5, value.reshape(len(value), num_heads, value_width)
    step = functional.softplus(decay.double() + weights.dt_bias.double())
    kept = step.view(len(step), num_heads, -1) * -weights.decay_rate.double()[:, None]
    kept = kept.exp()[..., None]
    strength = torch.sigmoid(beta.double()) * weights.max_beta
    outs = []
    for t in range(len(mixed)):
        matrices *= kept[t]
        recalled = torch.einsum("hk,hkv->hv", key[t], matrices)
        delta = (value[t] - recalled) * strength[t, :, None]
        matrices += key[t, :, :, None] * delta[:, None]
        outs.append(torch.einsum("hk,hkv->hv", query[t], matrices))
    result = torch.stack(outs)
    result = result / (result.square().mean(-1, keepdim=True) + weights.norm_eps).sqrt()
    gated = functional.silu(gate.double()) if weights.with_silu else gate.double().sigmoid()
    return ((result * weights.norm.double()).flatten(1) * gated).to(gate.dtype)
