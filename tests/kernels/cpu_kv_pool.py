"""Caches as the C kernels keep them."""

from __future__ import annotations

import torch

from batchinfer.kernels.cpu import paged_attention as cpu_attention


def store(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put what caches [slot, Hkv, block_size, width] hold by position where C looks for it."""
    rows = [cache.transpose(1, 2).flatten(0, 1).clone() for cache in (keys, values)]
    cpu_attention.kv_write(*rows, keys, values, torch.arange(len(rows[0])))
