"""Calls the C kernel of Mamba-1's scan over recurrent states in pool slots.

Reference: ``batchinfer.kernels.mamba1``, with the same arguments.
"""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.cpu.recurrent_state import StateArgs
from batchinfer.kernels.mamba1 import Mamba1Weights
from batchinfer.kernels.recurrent_state import PagedStates

_INPUTS = ("values", "dt", "write", "read", "gate")


class _Args(ctypes.Structure):
    _fields_ = (
        ("states", StateArgs),
        *((name, POINTER) for name in (*_INPUTS, "out", "decay_rate", "skip")),
        *((f"{name}_stride", INT64) for name in _INPUTS),
        *((name, INT64) for name in ("num_tokens", "num_channels", "state_size")),
        ("num_threads", INT32),
    )


def mamba1(
    values: torch.Tensor,  # [T, channels], last dimension contiguous, like all inputs
    dt: torch.Tensor,  # [T, channels]
    write: torch.Tensor,  # [T, N]
    read: torch.Tensor,  # [T, N]
    gate: torch.Tensor,  # [T, channels]
    *,
    weights: Mamba1Weights,
    states: PagedStates,
    out: torch.Tensor,  # [T, channels], contiguous
) -> None:
    """Run packed sequences through the scan of a layer and update their states in place.

    Tensors are float32 or bfloat16; sums are float32. A sequence's bits depend only on its own
    tokens, not on how the tokens are divided into steps.
    """
    inputs = values, dt, write, read, gate
    arguments = _Args(
        StateArgs.of(states),
        *(tensor.data_ptr() for tensor in (*inputs, out, weights.decay_rate, weights.skip)),
        *(tensor.stride(0) for tensor in inputs),
        *(len(values), values.shape[1], len(weights.decay_rate), torch.get_num_threads()),
    )
    getattr(load(), f"mamba1_{SUFFIX[out.dtype]}")(ctypes.byref(arguments))
