"""Freed memory is returned to the operating system."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from batchinfer.worker.memory import return_freed_memory

COUNT, ELEMENTS = 1024, 1 << 14  # 64 KiB each


def tensors() -> list[torch.Tensor]:
    return [torch.ones(ELEMENTS) for _ in range(COUNT)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_memory_allocated_by_another_thread_is_returned() -> None:
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(tensors).result()
        kept = made[::64]  # between freed tensors, so that malloc returns nothing by itself
        held = psutil.Process().memory_info().rss
        del made
        return_freed_memory()
        left = psutil.Process().memory_info().rss
    assert held - left > COUNT * ELEMENTS * 4 / 2
    assert all(bool((tensor == 1).all()) for tensor in kept)
