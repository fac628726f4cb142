"""Attention of vision towers on a CPU, computed by the C kernel of language models.

The kernel reads keys and values from blocks, so keys and values are first copied into a small pool.
Including this copy, the kernel takes 0.55 times as long as torch's attention in bfloat16, and about
as long in float32 (784 tokens, 6 heads of width 64, one thread with AVX-512). Calls with a mask,
and causal calls, use torch's attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from batchinfer.kernels.cpu.paged_attention import (
    kernel_of,
    kv_write,
    paged_attention,
    supports,
)
from batchinfer.worker.attention.native_cpu import instructions_for
from batchinfer.worker.linear_kernels import LinearKernel

_BLOCK_SIZE = 32


def vision_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, T, Dk]
    key: torch.Tensor,  # [B, Hkv, T, Dk]
    value: torch.Tensor,  # [B, Hkv, T, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    like: LinearKernel | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention for transformers. Return the output [B, T, H, Dv], and None for
    the attention weights."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_plain = attention_mask is None and not is_causal and query.shape[2] == key.shape[2]
    if not is_plain or kwargs.get("position_bias") is not None or not supports(query.dtype):
        # transformers' function also checks the other arguments.
        arguments = {"scaling": scaling, "is_causal": is_causal, **kwargs}
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
        return output, None
    count, heads, length, width = query.shape
    blocks = -(-length // _BLOCK_SIZE)
    queries, keys, values = (
        states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value)
    )
    # Use zeros, because the kernel multiplies values after the end of a sequence by 0.
    # Uninitialized memory could be NaN, and 0 times NaN is NaN.
    key_cache, value_cache = (
        states.new_zeros(count * blocks, states.shape[1], _BLOCK_SIZE, states.shape[2])
        for states in (keys, values)
    )
    tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
    slots = tables[:, :1].long() * _BLOCK_SIZE + torch.arange(length)
    kv_write(keys, values, key_cache, value_cache, slots.flatten())
    out = query.new_empty(count * length, heads, value.shape[3])
    paged_attention(
        *(queries, key_cache, value_cache, tables),
        torch.arange(0, (count + 1) * length, length, dtype=torch.int32),
        torch.full((count,), length, dtype=torch.int32),
        scale=width**-0.5 if scaling is None else scaling,
        out=out,
        query_ends=torch.full((count * length,), length, dtype=torch.int32),
        kernel=kernel_of(query.dtype, instructions_for(query.dtype, like)),
    )
    return out.view(count, length, heads, -1), None


def vision_attention(like: LinearKernel | None) -> str:
    """Register ``vision_attention_forward`` with transformers, and return its name there.

    Args:
        like: kernel of the model's linear layers (see ``NativeAttention``).
    """
    name = f"batchinfer_vision {'' if like is None else like.name}"
    AttentionInterface.register(name, partial(vision_attention_forward, like=like))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
