"""Knows when a step failed for want of memory, and lets go of what it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from batchinfer.engine.runner import OutOfMemory

_T = TypeVar("_T")
_MESSAGES = (
    "can't allocate memory",  # torch's allocator on the CPU, on Linux
    "not enough memory",  # on other systems
    "std::bad_alloc",
    "CUDA error: out of memory",  # the driver's, for pinned memory too
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_LONGEST_REASON = 200  # characters; torch goes on to explain its allocator


def raise_out_of_memory(compute: Callable[[], _T]) -> _T:
    """What ``compute`` returns.

    Raises:
        OutOfMemory: there was too little memory. The tensors of the attempt are gone by then, and
            torch keeps no CUDA memory that nothing uses.
    """
    try:
        return compute()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
    # Only past the handler are the frames that failed, and with them their tensors, let go.
    torch.cuda.empty_cache()
    raise OutOfMemory(reason)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory is what was lacking: torch's on either device, NumPy's or a C kernel's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
