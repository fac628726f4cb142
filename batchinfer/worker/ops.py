"""Row-wise operations for tensors on any device; ``kernels/reference.py`` defines their results.

On a CUDA device, the operations run in Triton. On a CPU, they run in C if a compiler is installed,
otherwise in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from batchinfer.kernels import reference
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.kernels.cpu import row_ops as cpu
from batchinfer.kernels.cpu.gemm import padded_rows
from batchinfer.kernels.rotary_pairs import PER_ELEMENT, RotaryPairs


@dataclass(frozen=True, slots=True)
class HeadNorms:
    query: torch.Tensor  # [D]; on a CUDA device also [Hq * D], for a norm of all heads together
    key: torch.Tensor  # [D] or [Hkv * D]
    eps: float
    offset: float
    """Number added to the norms' weights: 1 for Gemma, else 0."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, centered: bool = False
) -> torch.Tensor:
    """Return the root mean square norm of x [..., W], multiplied by a weight [W].

    Args:
        centered: True to subtract each row's mean first. The C kernels do not support it.

    Raises:
        ValueError: the weight's width or dtype differs from x's.
    """
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"a norm weight with {weight.numel()} elements of {weight.dtype} cannot be applied to "
            f"rows with {x.shape[-1]} elements of {x.dtype}"
        )
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if x.is_cuda:
        from batchinfer.kernels.rms_norm import rms_norm as triton_rms_norm

        triton_rms_norm(rows, weight, eps=eps, offset=offset, centered=centered, out=out)
    else:
        assert not centered
        _cpu(x.dtype).rms_norm(rows, weight, eps=eps, offset=offset, out=out)
    return out.view(x.shape)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` [T, W]. The gate is the first half of each row of ``gate_up``
    [T, 2 * W]; rows may be strided."""
    if gate_up.is_cuda:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        from batchinfer.kernels.silu_mul import silu_mul as triton_silu_mul

        triton_silu_mul(gate_up, out=out)
    else:
        out = padded_rows(len(gate_up), gate_up.shape[1] // 2, gate_up)
        _cpu(gate_up.dtype).silu_mul(gate_up, out=out)
    return out


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply the contiguous tensor x [T, H, D] in place by the sigmoid of ``gate`` [T, H, D].

    On a CUDA device, torch computes the product, and rounds the sigmoid to x's dtype.
    """
    if x.is_cuda:
        x *= gate.sigmoid()
    else:
        _cpu(x.dtype).sigmoid_mul(x, gate)


def rotary_write(
    qkv: torch.Tensor,  # [T, Hq * S + 2 * Hkv * D]
    cos: torch.Tensor,  # [T, R]
    sin: torch.Tensor,  # [T, R]
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64
    norms: HeadNorms | None,
    query_head_stride: int = 0,
    pairs: RotaryPairs = PER_ELEMENT,
) -> None:
    """Rotate the queries of ``qkv`` in place, and store the rotated keys and the values in the
    caches.

    Args:
        query_head_stride: distance S between query heads in elements; 0: D.
        pairs: which elements are rotated together. The C kernels support only the default.

    Raises:
        ValueError: shapes or dtypes do not match. The check is here, because kernels only get
            pointers.
    """
    width, rotary_width = key_cache.shape[3], cos.shape[-1] * (2 if pairs.halves else 1)
    weights = [] if norms is None else [norms.query, norms.key]
    stride, kv_width = query_head_stride or width, key_cache.shape[1] * width
    num_heads = (qkv.shape[1] - 2 * kv_width) // stride
    lengths = [len(weight) for weight in weights]
    fits = (
        key_cache.shape == value_cache.shape
        and qkv.shape[1] > 2 * kv_width
        and (qkv.shape[1] - 2 * kv_width) % stride == 0
        and qkv.stride(1) == 1
        and cos.shape == sin.shape == (len(qkv), cos.shape[-1])
        and rotary_width % 2 == 0
        and rotary_width <= width <= cpu.MAX_HEAD_WIDTH
        and lengths in ([], [width, width], [num_heads * width, kv_width] if qkv.is_cuda else [])
        and len({tensor.dtype for tensor in (qkv, cos, sin, *weights)}) == 1
        and key_cache.dtype in (qkv.dtype, torch.float8_e4m3fn)
    )
    if not fits:
        raise ValueError(
            f"q/k/v {tuple(qkv.shape)} {qkv.dtype}, rotary positions {tuple(cos.shape)} "
            f"{cos.dtype} and keys of width {width} {key_cache.dtype} do not match"
        )
    arguments = (qkv, cos.contiguous(), sin.contiguous(), key_cache, value_cache, slot_mapping)
    options = head_norm_options(norms) | {"query_head_stride": query_head_stride}
    if qkv.is_cuda:
        from batchinfer.kernels.rotary_write import rotary_write as triton_rotary_write

        triton_rotary_write(*arguments, **options, pairs=pairs)
    else:
        assert pairs == PER_ELEMENT
        _cpu(key_cache.dtype).rotary_write(*arguments, **options)


def head_norm_options(norms: HeadNorms | None) -> dict[str, Any]:
    if norms is None:
        return {"q_norm": None, "k_norm": None, "eps": 0.0, "offset": 0.0}
    options = {"q_norm": norms.query, "k_norm": norms.key}
    return {**options, "eps": norms.eps, "offset": norms.offset}


def _cpu(dtype: torch.dtype) -> ModuleType:
    return cpu if cpu_attention.supports(dtype) else reference
