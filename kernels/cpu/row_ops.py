"""Calls the C kernels for row-wise operations: norms, activations, rotary positions, logits.

Tensors are float32 or bfloat16. Results are computed in float32 and rounded once. The reference
implementations in ``reference`` have the same names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from batchinfer.kernels.cpu.compiled_library import FLOAT, INT32, INT64, POINTER, SUFFIX, load

MAX_HEAD_WIDTH = 1024


class RMSNormArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "out")),
        *((name, INT64) for name in ("num_rows", "row_stride", "out_row_stride", "width")),
        ("num_threads", INT32),
        *((name, FLOAT) for name in ("eps", "offset")),
    )


class SiluMulArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("gate_up", "out")),
        *((name, INT64) for name in ("num_rows", "row_stride", "out_row_stride", "width")),
        ("num_threads", INT32),
    )


class SigmoidMulArgs(ctypes.Structure):
    """The struct ``sigmoid_mul_args`` in arguments.h; all zeros if there is no gate."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "gate")),
        *((name, INT64) for name in ("x_token_stride", "gate_token_stride", "gate_head_stride")),
        *((name, INT32) for name in ("num_tokens", "num_heads", "width", "num_threads")),
    )


class _RowStatsArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("logits", "maximum", "max_logprob", "argmax")),
        *((name, INT64) for name in ("num_rows", "row_stride", "width")),
        ("num_threads", INT32),
    )


class _TokenBitmaskArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("logits", "rows", "masks")),
        *((name, INT64) for name in ("num_masked", "row_stride", "width", "words")),
        ("num_threads", INT32),
    )


class RotaryWriteArgs(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("qkv", "cos", "sin", "q_norm", "k_norm")),
        *((name, POINTER) for name in ("keys", "values", "slot_mapping")),
        *((name, INT64) for name in ("token_stride", "query_head_stride")),
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
    out: torch.Tensor,  # [N, W], last dimension contiguous
) -> None:
    """Compute ``out = x / sqrt(mean(x^2) + eps) * (offset + weight)`` for each row."""
    arguments = rms_norm_args(x, weight, eps=eps, offset=offset, out=out)
    _function("rms_norm", x.dtype)(ctypes.byref(arguments))


def rms_norm_args(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, out: torch.Tensor
) -> RMSNormArgs:
    return RMSNormArgs(
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(len(x), x.stride(0), out.stride(0), x.shape[1], torch.get_num_threads()),
        *(eps, offset),
    )


def silu_mul(
    gate_up: torch.Tensor,  # [N, 2 * W], last dimension contiguous
    *,
    out: torch.Tensor,  # [N, W], last dimension contiguous
) -> None:
    """Compute ``out = silu(gate) * up``. A row's first half is the gate, and its second half is
    up."""
    _function("silu_mul", gate_up.dtype)(ctypes.byref(silu_mul_args(gate_up, out=out)))


def silu_mul_args(gate_up: torch.Tensor, *, out: torch.Tensor) -> SiluMulArgs:
    return SiluMulArgs(
        *(gate_up.data_ptr(), out.data_ptr()),
        *(len(gate_up), gate_up.stride(0), out.stride(0), out.shape[1]),
        torch.get_num_threads(),
    )


def sigmoid_mul(
    x: torch.Tensor,  # [T, H, D], last two dimensions contiguous
    gate: torch.Tensor,  # [T, H, D], last dimension contiguous
) -> None:
    _function("sigmoid_mul", x.dtype)(ctypes.byref(sigmoid_mul_args(x, gate)))


def sigmoid_mul_args(x: torch.Tensor, gate: torch.Tensor) -> SigmoidMulArgs:
    return SigmoidMulArgs(
        *(x.data_ptr(), gate.data_ptr(), x.stride(0), *gate.stride()[:2]),
        *(*x.shape, torch.get_num_threads()),
    )


def row_stats(
    logits: torch.Tensor,  # [R, V], last dimension contiguous
    *,
    maximum: torch.Tensor,  # [R] float32
    max_logprob: torch.Tensor,  # [R] float32
    argmax: torch.Tensor,  # [R] int64
) -> None:
    """Compute each row's maximum, and the log-probability and first index of the maximum. If a row
    has a NaN, the maximum and the log-probability are NaN."""
    arguments = _RowStatsArgs(
        *(tensor.data_ptr() for tensor in (logits, maximum, max_logprob, argmax)),
        *(len(logits), logits.stride(0), logits.shape[1], torch.get_num_threads()),
    )
    _function("row_stats", logits.dtype)(ctypes.byref(arguments))


def apply_token_bitmask(
    logits: torch.Tensor,  # [R, V], last dimension contiguous
    rows: torch.Tensor,  # [M] int32, indices of rows, all different
    masks: torch.Tensor,  # [M, words] int32, contiguous
) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    Token ``i`` is allowed if bit ``i % 32`` of word ``i // 32`` is set. Tokens beyond the last word
    are forbidden.
    """
    arguments = _TokenBitmaskArgs(
        *(tensor.data_ptr() for tensor in (logits, rows, masks)),
        *(len(rows), logits.stride(0), logits.shape[1], masks.shape[1]),
        torch.get_num_threads(),
    )
    _function("apply_token_bitmask", logits.dtype)(ctypes.byref(arguments))


def rotary_write(
    qkv: torch.Tensor,  # [T, Hq * S + 2 * Hkv * D], last dimension contiguous
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
    query_head_stride: int = 0,
) -> None:
    """Normalize and rotate queries in place. Store the normalized, rotated keys and the unchanged
    values in their slots.

    Args:
        query_head_stride: distance S between query heads in elements; 0: D.
    """
    arguments = rotary_write_args(
        *(qkv, cos, sin, key_cache, value_cache, slot_mapping),
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        offset=offset,
        query_head_stride=query_head_stride,
    )
    _function("rotary_write", qkv.dtype)(ctypes.byref(arguments))


def rotary_write_args(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    query_head_stride: int,
) -> RotaryWriteArgs:
    _, num_kv_heads, block_size, width = key_cache.shape
    assert width <= MAX_HEAD_WIDTH
    stride = query_head_stride or width
    num_heads = (qkv.shape[1] - 2 * num_kv_heads * width) // stride
    return RotaryWriteArgs(
        *(tensor.data_ptr() for tensor in (qkv, cos, sin)),
        *(None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)),
        *(tensor.data_ptr() for tensor in (key_cache, value_cache, slot_mapping)),
        *(qkv.stride(0), stride),
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        *(len(qkv), num_heads, num_kv_heads, width),
        *(cos.shape[1], block_size, torch.get_num_threads()),
        *(eps, offset),
    )


def _function(name: str, dtype: torch.dtype) -> Callable[[object], None]:
    library = load()
    assert library is not None
    function: Callable[[object], None] = getattr(library, f"{name}_{SUFFIX[dtype]}")
    return function
