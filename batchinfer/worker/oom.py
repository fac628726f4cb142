"""Recognizes out-of-memory errors, and frees the memory of the failed step."""

from __future__ import annotations

from traceback import clear_frames
from types import TracebackType

import torch

from batchinfer.engine.runner import OutOfMemory
from batchinfer.errors import one_line

_MESSAGES = (
    "can't allocate memory",  # torch's allocator on the CPU, on Linux
    "not enough memory",  # torch's allocator on the CPU, on other systems
    "std::bad_alloc",
    "CUDA error: out of memory",  # the CUDA driver's error, for pinned memory too
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_LONGEST_REASON = 200  # in characters; the rest of torch's message describes its allocator


class raise_out_of_memory:  # noqa: N801
    """Turns an out-of-memory error inside the ``with`` block into ``OutOfMemory``.

    Frees the tensors that the failed functions held, and the CUDA memory that torch has reserved
    but does not use. ``raise_out_of_memory`` is a class, because a generator would cost each step a
    microsecond.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not is_out_of_memory(error):
            return
        reason = one_line(error, _LONGEST_REASON)
        clear_frames(traceback)  # otherwise, the error keeps the tensors alive
        error.__context__ = error.__cause__ = None
        torch.cuda.empty_cache()
        raise OutOfMemory(reason) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch (on either device), NumPy or a C kernel ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
