"""Errors for want of memory, told from others, and what a failed step held let go."""

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
_LONGEST_REASON = 200  # characters; torch goes on to explain its allocator


class raise_out_of_memory:  # noqa: N801
    """Turn an error inside for want of memory into ``OutOfMemory``, and let go of what it had.

    A class, as a generator would cost each step a microsecond.

    Raises:
        OutOfMemory: there was too little memory. The tensors of the functions that failed are gone
            by then, and torch keeps no CUDA memory that nothing uses.
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
    """Whether memory is what was lacking: torch's on either device, NumPy's or a C kernel's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
