"""Recognizes out-of-memory errors and frees what the failed step had allocated."""

from __future__ import annotations

from traceback import clear_frames
from types import TracebackType

import torch

from batchinfer.engine.runner import OutOfMemory
from batchinfer.errors import one_line

_MESSAGES = (
    "can't allocate memory",  # torch's allocator on the CPU, on Linux
    "not enough memory",  # on other systems
    "std::bad_alloc",
    "CUDA error: out of memory",  # the driver's, for pinned memory too
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_LONGEST_REASON = 200  # characters; torch then explains its allocator


class raise_out_of_memory:  # noqa: N801
    """Turn an out-of-memory error inside into ``OutOfMemory``.

    The tensors of the functions that failed are freed by then, and torch keeps no unused CUDA
    memory. A class, because a generator would cost each step a microsecond.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not is_out_of_memory(error):
            return
        reason = one_line(error, _LONGEST_REASON)
        clear_frames(traceback)  # they hold their tensors for as long as the error lives
        error.__context__ = error.__cause__ = None
        torch.cuda.empty_cache()
        raise OutOfMemory(reason) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch (on either device), NumPy or a C kernel ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
