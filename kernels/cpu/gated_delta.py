"""Calls the C kernels of Gated DeltaNet and Kimi Delta Attention over states in pool slots.

Reference: ``batchinfer.kernels.gated_delta``, with the same arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from batchinfer.kernels.cpu.compiled_library import FLOAT, INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.cpu.recurrent_state import ConvolutionArgs, StateArgs, workspace
from batchinfer.kernels.gated_delta import GatedDeltaWeights
from batchinfer.kernels.recurrent_state import PagedStates


class GatedDeltaArgs(ctypes.Structure):
    """The struct ``gated_delta_args`` in gated_delta.h."""

    _fields_ = (
        ("states", StateArgs),
        ("conv", ConvolutionArgs),
        *((name, POINTER) for name in ("gate", "decay", "beta", "out")),
        *((name, POINTER) for name in ("decay_rate", "dt_bias", "norm")),
        *((name, POINTER) for name in ("kept", "strength", "read", "decayed_keys")),
        *((name, INT64) for name in ("gate_stride", "decay_stride", "beta_stride")),
        *((name, INT64) for name in ("out_stride", "num_tokens")),
        *((name, INT64) for name in ("num_key_heads", "num_heads", "key_width", "value_width")),
        ("decay_width", INT64),
        *((name, INT32) for name in ("num_threads", "with_silu")),
        *((name, FLOAT) for name in ("norm_eps", "max_beta")),
    )


def gated_delta(
    qkv: torch.Tensor,  # [T, channels], last dimension contiguous, like all inputs
    gate: torch.Tensor,  # [T, Hv * Dv]
    decay: torch.Tensor,  # [T, Hv * decay_width]
    beta: torch.Tensor,  # [T, Hv]
    *,
    weights: GatedDeltaWeights,
    states: PagedStates,
    out: torch.Tensor,  # [T, Hv * Dv], contiguous
) -> None:
    """Run packed sequences through a layer and update their states in place.

    Tensors are float32 or bfloat16; sums are float32. A sequence's bits depend only on its own
    tokens, not on how the tokens are divided into steps.
    """
    buffers = workspace(len(beta), *workspace_widths(qkv.shape[1], weights))
    arguments = gated_delta_args(
        *(qkv, gate, decay, beta), weights=weights, states=states, out=out, buffers=buffers
    )
    getattr(load(), f"gated_delta_{SUFFIX[out.dtype]}")(ctypes.byref(arguments))


def workspace_widths(num_channels: int, weights: GatedDeltaWeights) -> list[int]:
    """Return the widths of the float32 buffers that a layer with ``num_channels`` in its
    convolution needs for each token."""
    num_heads = len(weights.decay_rate)
    widths = [num_channels, num_heads * weights.decay_width, num_heads]
    widths.append(num_heads * len(weights.norm))
    return widths + [num_heads * weights.key_width] * (weights.decay_width > 1)


def gated_delta_args(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    weights: GatedDeltaWeights,
    states: PagedStates,
    out: torch.Tensor,  # [T, Hv * Dv], last dimension contiguous
    buffers: Sequence[torch.Tensor],
) -> GatedDeltaArgs:
    """Convert the arguments of ``gated_delta`` to the C function's arguments. The returned struct
    does not keep the tensors alive.

    Args:
        buffers: a float32 buffer [T, width] for each of ``workspace_widths``.
    """
    num_tokens, num_heads = beta.shape
    mixed, kept, strength, read, *decayed_keys = buffers
    return GatedDeltaArgs(
        StateArgs.of(states),
        ConvolutionArgs.of(qkv, weights.conv, None, mixed),
        *(tensor.data_ptr() for tensor in (gate, decay, beta, out)),
        *(tensor.data_ptr() for tensor in (weights.decay_rate, weights.dt_bias, weights.norm)),
        *(tensor.data_ptr() for tensor in (kept, strength, read)),
        decayed_keys[0].data_ptr() if decayed_keys else None,
        *(tensor.stride(0) for tensor in (gate, decay, beta, out)),
        *(num_tokens, weights.num_key_heads, num_heads, weights.key_width, len(weights.norm)),
        *(weights.decay_width, torch.get_num_threads(), weights.with_silu),
        *(weights.norm_eps, weights.max_beta),
    )
