"""Calls the C kernel of a causal convolution with its state in pool slots.

Reference: ``batchinfer.kernels.causal_conv``, with the same arguments.
"""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.causal_conv import CausalConvWeights
from batchinfer.kernels.cpu.compiled_library import INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.cpu.recurrent_state import ConvolutionArgs, StateArgs
from batchinfer.kernels.recurrent_state import PagedStates


class _Args(ctypes.Structure):
    _fields_ = (
        ("states", StateArgs),
        ("conv", ConvolutionArgs),
        *((name, POINTER) for name in ("before", "after", "out")),
        *(("num_tokens", INT64), ("num_threads", INT32), ("with_silu", INT32)),
    )


def causal_conv(
    inputs: torch.Tensor,  # [T, channels], last dimension contiguous
    before: torch.Tensor | None = None,  # [T, channels], with the strides of inputs
    after: torch.Tensor | None = None,  # [T, channels], with the strides of inputs
    *,
    weights: CausalConvWeights,
    states: PagedStates,
    out: torch.Tensor,  # [T, channels], contiguous
) -> None:
    """Run packed sequences through a layer and update their states in place.

    Tensors are float32 or bfloat16; sums are float32. A sequence's bits depend only on its own
    tokens, not on how the tokens are divided into steps.
    """
    factors = before, after
    assert all(one is None or one.stride() == inputs.stride() for one in factors)
    arguments = _Args(
        StateArgs.of(states),
        ConvolutionArgs.of(inputs, weights.conv, weights.bias, None),
        *(None if one is None else one.data_ptr() for one in factors),
        *(out.data_ptr(), len(inputs), torch.get_num_threads(), weights.silu),
    )
    getattr(load(), f"causal_conv_{SUFFIX[out.dtype]}")(ctypes.byref(arguments))
