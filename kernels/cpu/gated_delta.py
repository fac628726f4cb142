"""Gated DeltaNet over recurrent states in pool slots, in C, called through ctypes.

Reference: ``batchinfer.kernels.gated_delta``, with the same arguments.
"""

from __future__ import annotations

import ctypes

import torch

from batchinfer.kernels.cpu.compiled_library import FLOAT, INT32, INT64, POINTER, SUFFIX, load
from batchinfer.kernels.gated_delta import GatedDeltaWeights, StatePlaces

MAX_CONV_WIDTH = 16


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("qkv", "gate", "decay", "beta", "out", "conv")),
        *((name, POINTER) for name in ("decay_rate", "dt_bias", "norm", "mixed", "gates", "read")),
        *((name, POINTER) for name in ("states", "state_tables", "query_starts", "context_lens")),
        *((name, INT64) for name in ("qkv_stride", "gate_stride", "decay_stride", "beta_stride")),
        *((name, INT64) for name in ("slot_stride", "table_width", "num_tokens", "num_sequences")),
        *((name, INT64) for name in ("num_channels", "conv_width", "num_key_heads", "num_heads")),
        *((name, INT64) for name in ("key_width", "value_width", "columns", "per_slot", "first")),
        *((name, INT64) for name in ("channels", "conv_per_slot", "conv_first", "conv_slot")),
        ("num_threads", INT32),
        *((name, FLOAT) for name in ("norm_eps", "max_beta")),
    )


def supports(dtype: torch.dtype, conv_width: int = 1) -> bool:
    """Return true if the C kernels can be compiled and support ``dtype`` and the convolution's
    width."""
    return dtype in SUFFIX and conv_width <= MAX_CONV_WIDTH and load() is not None


def gated_delta(
    qkv: torch.Tensor,  # [T, channels], last dimension contiguous, like all inputs here
    gate: torch.Tensor,  # [T, Hv * Dv]
    decay: torch.Tensor,  # [T, Hv]
    beta: torch.Tensor,  # [T, Hv]
    *,
    weights: GatedDeltaWeights,
    states: torch.Tensor,  # [num_slots, elements of a slot] float32
    places: StatePlaces,
    state_tables: torch.Tensor,  # [S, slots of a state] int32, contiguous
    query_starts: torch.Tensor,  # [S + 1] int32
    context_lens: torch.Tensor,  # [S] int32
    out: torch.Tensor,  # [T, Hv * Dv], contiguous
) -> None:
    """Run packed sequences through a layer and update their states in place.

    float32 or bfloat16, float32 accumulation. A row's bits depend on its own tokens alone, not on
    how they are cut into steps.
    """
    library = load()
    assert library is not None
    conv_width, channels = weights.conv.shape
    assert conv_width <= MAX_CONV_WIDTH
    num_tokens, num_heads = decay.shape
    workspace = [
        torch.empty(num_tokens, width, dtype=torch.float32)
        for width in (channels, 2 * num_heads, out.shape[1])
    ]
    arguments = _Args(
        *(tensor.data_ptr() for tensor in (qkv, gate, decay, beta, out, weights.conv)),
        *(tensor.data_ptr() for tensor in (weights.decay_rate, weights.dt_bias, weights.norm)),
        *(tensor.data_ptr() for tensor in workspace),
        *(tensor.data_ptr() for tensor in (states, state_tables, query_starts, context_lens)),
        *(tensor.stride(0) for tensor in (qkv, gate, decay, beta, states)),
        *(state_tables.shape[1], num_tokens, len(context_lens), channels, conv_width),
        *(weights.num_key_heads, num_heads, weights.key_width, len(weights.norm)),
        *(places.columns, places.per_slot, places.first),
        *(places.channels, places.conv_per_slot, places.conv_first, places.conv_slot),
        *(torch.get_num_threads(), weights.norm_eps, weights.max_beta),
    )
    getattr(library, f"gated_delta_{SUFFIX[out.dtype]}")(ctypes.byref(arguments))
