"""Memory in huge pages, where Linux gives them: weights are read from one end to the other.

With pages of 4 KiB every 64 lines wait for a walk of the page table, which is long on a virtual
machine: products of 8 to 64 rows take 10 to 20 % less time with pages of 2 MiB, which Linux gives
to memory that asks for them (``MADV_HUGEPAGE``); torch does not.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch

_LINE = 64  # bytes of a cache line
_CHUNK = 16 << 20
_OF_ITS_OWN = 4 << 20
"""Bytes from which on a tensor has memory of its own: what goes leaves little behind."""


class HugePages:
    """Tensors one after the other in chunks of memory, which go with the last tensor in them."""

    def __init__(self) -> None:
        self._chunk: weakref.ref[mmap.mmap] | None = None
        self._used = 0
        self._lock = threading.Lock()  # models may be loaded beside each other

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor [count] that begins at a cache line.

        Raises:
            MemoryError: there is none.
        """
        size = count * dtype.itemsize
        if size >= _OF_ITS_OWN:
            return _part(_chunk(size), 0, size).view(dtype)
        with self._lock:
            chunk = self._chunk() if self._chunk else None
            if chunk is None or self._used + size > _CHUNK:
                chunk, self._used = _chunk(_CHUNK), 0
                self._chunk = weakref.ref(chunk)
            part = _part(chunk, self._used, size).view(dtype)
            self._used += -(-size // _LINE) * _LINE
        return part


def _chunk(size: int) -> mmap.mmap:
    try:
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes of weights") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that has none
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk


def _part(chunk: mmap.mmap, begin: int, size: int) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=begin)
