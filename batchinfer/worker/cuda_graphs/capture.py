"""Captures computations as CUDA graphs, all of which use the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Integer types, keyed by bytes per element. They replace bfloat16, which NumPy does not have.
_INTEGERS = {2: "<i2", 4: "<i4"}

Run = Callable[[], tuple[torch.Tensor, ...]]
Capture = Callable[[Run], Run]
"""Captures a computation, and returns a function that repeats the computation with the current
contents of its inputs."""


class CudaCapture:
    """Captures computations on the current device, and returns functions that repeat them.

    All graphs use the same memory, one after the other: results are valid until the next replay.
    After a failure that CUDA itself reports, later graphs use new memory.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        # Graphs whose capture never ended are kept, because torch's allocator still calls them.
        self._never_ended: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Run) -> Run:
        """Capture ``run``, which must have run once before.

        Raises:
            RuntimeError: ``run`` does something that cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        # Restores the current stream. If CUDA refuses to end a capture, torch leaves the capture's
        # stream as the current one.
        here = torch.cuda.stream(torch.cuda.current_stream())
        # Other threads may use CUDA during the capture, for example those that read files.
        capturing = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        try:
            with here, capturing:
                results = [result.contiguous() for result in run()]
        except BaseException:
            if not _has_ended(graph):  # torch will regard the pool as in use forever
                self._pool = None
                self._never_ended.append(graph)
            raise
        self._pool = pool  # set only now, because torch forgets a pool without graphs
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


class _Memory:
    """A view of a tensor's memory that does not own it (NumPy's CUDA array interface, version
    3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _INTEGERS[tensor.element_size()],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that does not own its memory, so that other graphs of the pool can use it."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
