"""Row-wise operations on whatever device the tensors are on.

Triton on a CUDA device; on a CPU the C kernels where they can be built, else the torch twins. What
each computes is said in ``kernels/reference.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from batchinfer.kernels import reference
from batchinfer.kernels.cpu import native
from batchinfer.kernels.cpu import row_ops as cpu


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root mean square norms of each query head and each key head."""

    query: torch.Tensor  # [D]
    key: torch.Tensor  # [D]
    eps: float
    offset: float
    """Added to the weights: 1 for Gemma, else 0."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
    """[..., W], weight [W], to [..., W]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if x.is_cuda:
        from batchinfer.kernels.rms_norm import rms_norm as triton_rms_norm

        triton_rms_norm(rows, weight, eps=eps, offset=offset, out=out)
    else:
        _cpu(x.dtype).rms_norm(rows, weight, eps=eps, offset=offset, out=out)
    return out.view(x.shape)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * W], gate and up side by side, to [T, W]."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    if gate_up.is_cuda:
        from batchinfer.kernels.silu_mul import silu_mul as triton_silu_mul

        triton_silu_mul(gate_up, out=out)
    else:
        _cpu(gate_up.dtype).silu_mul(gate_up, out=out)
    return out


def rotary_write(
    qkv: torch.Tensor,  # [T, (Hq + 2 * Hkv) * D]
    cos: torch.Tensor,  # [T, R]
    sin: torch.Tensor,  # [T, R]
    key_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    value_cache: torch.Tensor,  # [num_slots, Hkv, block_size, D]
    slot_mapping: torch.Tensor,  # [T] int64
    norms: HeadNorms | None,
) -> None:
    """Turn the queries of ``qkv`` in place, and put its keys and values into their slots."""
    arguments = (qkv, cos.contiguous(), sin.contiguous(), key_cache, value_cache, slot_mapping)
    options: dict[str, Any] = {}
    if norms is not None:
        options = {
            "q_norm": norms.query,
            "k_norm": norms.key,
            "eps": norms.eps,
            "offset": norms.offset,
        }
    if qkv.is_cuda:
        from batchinfer.kernels.rotary_write import rotary_write as triton_rotary_write

        triton_rotary_write(*arguments, **options)
    else:
        _cpu(qkv.dtype).rotary_write(*arguments, **options)


def _cpu(dtype: torch.dtype) -> ModuleType:
    return cpu if native.supports(dtype) else reference
