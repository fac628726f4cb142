"""Captures computations as CUDA graphs that share one memory pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from batchinfer.worker.oom import is_out_of_memory

# Integer types, keyed by bytes per element. Floating-point arrays are described as integers,
# because NumPy has no bfloat16.
_INTEGERS = {2: "<i2", 4: "<i4"}

Run = Callable[[], tuple[torch.Tensor, ...]]
Capture = Callable[[Run], Run]
"""Captures a computation. The returned function repeats it with the current contents of its
inputs."""


class CaptureRefusedError(RuntimeError):
    """CUDA could not end a capture because of an operation in the captured computation."""


class CudaCapture:
    """Captures computations on the current device.

    All graphs use the same memory, so results are valid only until the next replay of any graph.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._never_ended: list[torch.cuda.CUDAGraph] = []  # kept, because torch refers to them

    def __call__(self, run: Run) -> Run:
        """Capture ``run``, which must have run once before.

        Raises:
            CaptureRefusedError: ``run`` contains an operation that cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        # This context restores the current stream on exit. If CUDA refuses to end a capture, torch
        # leaves the capture's stream as the current one.
        here = torch.cuda.stream(torch.cuda.current_stream())
        # Other threads, such as the threads that read files, may use CUDA during the capture.
        capturing = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        try:
            with here, capturing:
                results = [result.contiguous() for result in run()]
        except BaseException as error:
            if not _has_ended(graph):
                self._never_ended.append(graph)
                _end_allocation(pool)
                if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                    raise CaptureRefusedError(str(error)) from error
            raise
        self._pool = pool  # set only after a success, because torch discards a pool without graphs
        aliases = tuple(map(_alias, results))

        def replay() -> tuple[torch.Tensor, ...]:
            graph.replay()
            return aliases

        return replay


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _end_allocation(pool: tuple[int, int]) -> None:
    """Tell torch's allocator that a failed capture is over. torch does this itself only after a
    successful capture.

    After a failed capture, torch's allocator would otherwise assume that the capture is still in
    progress, and would never again release unused memory.
    """
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # the allocation may not have begun
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


class _Memory:
    """A non-owning view of a tensor's memory (NumPy's CUDA array interface, version 3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _INTEGERS[tensor.element_size()],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a non-owning view of a tensor, so that other graphs in the pool can reuse its
    memory."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
