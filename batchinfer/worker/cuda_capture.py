"""CUDA graphs that share one pool of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_INTEGERS = {2: "<i2", 4: "<i4"}  # bytes of an element: NumPy's name, which has no bfloat16


class CudaCapture:
    """Captures computations on the current device; each gives back a call that repeats it.

    All graphs use the same memory, one after the other: results are good until the next replay.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture ``run``, which has run before.

        Raises:
            RuntimeError: it does something that cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads (tokenizing, reading files) may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run().contiguous()
        alias = _alias(result)

        def replay() -> torch.Tensor:
            graph.replay()
            return alias

        return replay


class _Memory:
    """Where a tensor lies, without owning it (NumPy's CUDA array interface, version 3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _INTEGERS[tensor.element_size()],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A view that does not keep the memory from the pool's other graphs.

    The logits of the largest batch are most of what a graph holds; with an owner each graph would
    keep its own. The memory itself stays as long as one graph of the pool does.
    """
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
