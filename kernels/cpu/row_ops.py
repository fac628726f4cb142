"""What a layer does to each token on its own, in C, called through ctypes.

float32 or bfloat16, float32 arithmetic, rounded once; twins of the same names: ``reference``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from batchinfer.kernels.cpu.library import FLOAT, INT32, INT64, POINTER, SUFFIX, load

MAX_HEAD_WIDTH = 1024


class _RMSNormArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "out")),
        *((name, INT64) for name in ("num_rows", "row_stride", "width")),
        ("num_threads", INT32),
        *((name, FLOAT) for name in ("eps", "offset")),
    )


class _SiluMulArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("gate_up", "out")),
        *((name, INT64) for name in ("num_rows", "row_stride", "out_row_stride", "width")),
        ("num_threads", INT32),
    )


class _RotaryWriteArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("qkv", "cos", "sin", "q_norm", "k_norm")),
        *((name, POINTER) for name in ("keys", "values", "slot_mapping")),
        ("token_stride", INT64),
        *((name, INT64) for name in ("keys_slot_stride", "keys_head_stride")),
        *((name, INT64) for name in ("values_slot_stride", "values_head_stride")),
        *((name, INT32) for name in ("num_tokens", "num_heads", "num_kv_heads", "width")),
        *((name, INT32) for name in ("rotary_width", "block_size", "num_threads")),
        *((name, FLOAT) for name in ("eps", "offset")),
    )


def rms_norm(
    x: torch.Tensor,  # [N, W], last dimension contiguous
    weight: torch.Tensor,  # [W]
    *,
    eps: float,
    offset: float = 0.0,
    out: torch.Tensor,  # [N, W], contiguous
) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * (offset + weight)``, row by row."""
    arguments = _RMSNormArgs(
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(len(x), x.stride(0), x.shape[1], torch.get_num_threads()),
        *(eps, offset),
    )
    _function("rms_norm", x.dtype)(ctypes.byref(arguments))


def silu_mul(
    gate_up: torch.Tensor,  # [N, 2 * W], last dimension contiguous
    *,
    out: torch.Tensor,  # [N, W], last dimension contiguous
) -> None:
    """``out = silu(gate) * up`` of rows that hold gate and up side by side."""
    arguments = _SiluMulArgs(
        *(gate_up.data_ptr(), out.data_ptr()),
        *(len(gate_up), gate_up.stride(0), out.stride(0), out.shape[1]),
        torch.get_num_threads(),
    )
    _function("silu_mul", gate_up.dtype)(ctypes.byref(arguments))


def rotary_write(
    qkv: torch.Tensor,  # [T, (Hq + 2 * Hkv) * D], last dimension contiguous
    cos: torch.Tensor,  # [T, R], contiguous
    sin: torch.Tensor,  # [T, R], contiguous
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D], last two contiguous
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D], last two contiguous
    slot_mapping: torch.Tensor,  # [T] int64
    *,
    q_norm: torch.Tensor | None = None,  # [D]
    k_norm: torch.Tensor | None = None,  # [D]
    eps: float = 0.0,
    offset: float = 0.0,
) -> None:
    """Normalise and rotate queries in place, and keys on their way into the cache."""
    _, num_kv_heads, block_size, width = key_cache.shape
    assert width <= MAX_HEAD_WIDTH
    arguments = _RotaryWriteArgs(
        *(tensor.data_ptr() for tensor in (qkv, cos, sin)),
        *(None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)),
        *(tensor.data_ptr() for tensor in (key_cache, value_cache, slot_mapping)),
        qkv.stride(0),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        *(len(qkv), qkv.shape[1] // width - 2 * num_kv_heads, num_kv_heads, width),
        *(cos.shape[1], block_size, torch.get_num_threads()),
        *(eps, offset),
    )
    _function("rotary_write", qkv.dtype)(ctypes.byref(arguments))


def _function(name: str, dtype: torch.dtype) -> Callable[[object], None]:
    library = load()
    assert library is not None
    function: Callable[[object], None] = getattr(library, f"{name}_{SUFFIX[dtype]}")
    return function
