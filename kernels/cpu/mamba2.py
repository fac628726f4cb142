"""Calls the C kernel of Mamba-2 over recurrent states in pool slots.

Reference: ``batchinfer.kernels.mamba2``, with the same arguments.
"""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import FLOAT, INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.cpu.recurrent_state import ConvolutionArgs, StateArgs, workspace
from batchinfer.kernels.mamba2 import Mamba2Weights
from batchinfer.kernels.recurrent_state import PagedStates


class _Args(ctypes.Structure):
    _fields_ = (
        ("states", StateArgs),
        ("conv", ConvolutionArgs),
        *((name, POINTER) for name in ("gate", "dt", "out", "decay_rate", "dt_bias", "skip")),
        *((name, POINTER) for name in ("norm", "steps", "read")),
        *((name, INT64) for name in ("gate_stride", "dt_stride", "num_tokens", "num_groups")),
        *((name, INT64) for name in ("num_heads", "state_size", "head_width", "norm_width")),
        *((name, INT32) for name in ("num_threads", "gate_first")),
        *((name, FLOAT) for name in ("norm_eps", "min_dt", "max_dt")),
    )


def mamba2(
    values: torch.Tensor,  # [T, channels], last dimension contiguous, like all inputs
    gate: torch.Tensor,  # [T, H * P]
    dt: torch.Tensor,  # [T, H]
    *,
    weights: Mamba2Weights,
    states: PagedStates,
    out: torch.Tensor,  # [T, H * P], contiguous
) -> None:
    """Run packed sequences through a layer and update their states in place.

    Tensors are float32 or bfloat16; sums are float32. A sequence's bits depend only on its own
    tokens, not on how the tokens are divided into steps.
    """
    num_tokens, num_heads = dt.shape
    mixed, steps, read = workspace(num_tokens, values.shape[1], 2 * num_heads, out.shape[1])
    constants = weights.decay_rate, weights.dt_bias, weights.skip
    arguments = _Args(
        StateArgs.of(states),
        ConvolutionArgs.of(values, weights.conv, weights.conv_bias, mixed),
        *(tensor.data_ptr() for tensor in (gate, dt, out, *constants)),
        None if weights.norm is None else weights.norm.data_ptr(),
        *(steps.data_ptr(), read.data_ptr(), gate.stride(0), dt.stride(0), num_tokens),
        *(weights.num_groups, num_heads, weights.state_size, out.shape[1] // num_heads),
        *(weights.norm_width, torch.get_num_threads(), weights.gate_first, weights.norm_eps),
        *weights.dt_limits,
    )
    getattr(load(), f"mamba2_{SUFFIX[out.dtype]}")(ctypes.byref(arguments))
