"""Memory of packed weights: alignment, separate tensors, and release."""

from __future__ import annotations

import errno
import gc
import mmap
import threading
import weakref
from typing import Any

import pytest
import torch

from batchinfer.kernels.cpu import huge_pages
from batchinfer.kernels.cpu.huge_pages import HugePages

MIB = 1 << 20


def test_small_tensors_are_adjacent_and_aligned() -> None:
    memory = HugePages()
    first, second = memory.empty(33, torch.bfloat16), memory.empty(100, torch.float32)
    assert [first.shape, second.shape] == [(33,), (100,)]
    assert first.data_ptr() % 64 == 0
    assert second.data_ptr() == first.data_ptr() + 128


@pytest.mark.parametrize("sizes", [(1, 9 * MIB, 1), (3 * MIB,) * 12, (0, 5, 0, 7)], ids=str)
def test_tensors_do_not_overlap(sizes: tuple[int, ...]) -> None:
    memory = HugePages()
    tensors = [memory.empty(size, torch.uint8).fill_(at) for at, size in enumerate(sizes)]
    for at, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert len(tensor) == size
        assert (tensor == at).all()


def test_threads_get_separate_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread allocates while the first one is in the middle of an allocation."""
    memory, taken = HugePages(), list[torch.Tensor]()
    other = threading.Thread(target=lambda: taken.append(memory.empty(10, torch.uint8)))
    part = huge_pages._part

    def interrupted(*arguments: Any) -> torch.Tensor:
        monkeypatch.setattr(huge_pages, "_part", part)
        other.start()
        other.join(0.1)  # the other thread may wait for this one
        return part(*arguments)

    monkeypatch.setattr(huge_pages, "_part", interrupted)
    taken.append(memory.empty(10, torch.uint8))
    other.join()
    assert abs(taken[0].data_ptr() - taken[1].data_ptr()) >= 10


def test_memory_is_freed_with_its_last_tensor() -> None:
    memory = HugePages()
    tensors = [memory.empty(10, torch.uint8) for _ in range(2)]
    assert memory._chunk is not None
    chunk: weakref.ref[object] = memory._chunk
    tensors.pop()
    gc.collect()
    assert chunk() is not None
    tensors.clear()
    gc.collect()
    assert chunk() is None
    assert len(memory.empty(10, torch.uint8)) == 10


def test_memory_is_allocated_without_huge_page_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1 << 20, raising=False)  # a value that Linux rejects
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, 4096).madvise(mmap.MADV_HUGEPAGE)
    for size in (10, 9 * MIB):
        assert HugePages().empty(size, torch.uint8).fill_(7).sum() == 7 * size


def test_failed_allocation_raises_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would report an OSError as a problem with files."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="not enough memory for 9437184 bytes of weights"):
        HugePages().empty(9 * MIB, torch.uint8)
