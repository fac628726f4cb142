"""CUDA graphs that share one pool of memory, and a watch for operations that make the host wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Integer types by bytes per element, because NumPy has no name for bfloat16.
_INTEGERS = {2: "<i2", 4: "<i4"}

# Operations whose result is on the host, or whose result's size depends on data on the device.
_WAITS = frozenset(
    [
        *("_local_scalar_dense", "allclose", "equal", "is_nonzero", "item", "nonzero"),
        *("_unique2", "unique_consecutive", "unique_dim", "bincount", "masked_select", "one_hot"),
    ]
)


Run = Callable[[], tuple[torch.Tensor, ...]]
Capture = Callable[[Run], Run]
"""Captures a computation. The result repeats it with the current contents of its inputs."""


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
        # If CUDA refuses to end a capture, the capture's stream would stay the current stream.
        here = torch.cuda.stream(torch.cuda.current_stream())
        # Other threads, such as tokenizing and reading files, may run during the capture.
        capturing = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        try:
            with here, capturing:
                results = [result.contiguous() for result in run()]
        except BaseException:
            if not _has_ended(graph):  # torch now regards the pool as in use forever
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


class SyncWatch(TorchDispatchMode):
    """Records the names of torch operations that make the host wait, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if (
            name in _WAITS
            or (name == "where" and len(args) == 1)
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
            or (name.startswith("index") and _has_mask(args))
            or _comes_to_host(args, result)
            or _leaves_pageable_memory(name, args, result)
        ):
            self.seen.add(name)
        return result


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(at, torch.Tensor) and at.dtype is torch.bool for at in indices)


def _comes_to_host(args: Any, result: Any) -> bool:
    first = args[0] if args else None
    if not (isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    return first.device.type != "cpu" and result.device.type == "cpu"


def _leaves_pageable_memory(name: str, args: Any, result: Any) -> bool:
    """Return true if a tensor is copied from pageable memory, because CUDA then waits for the
    stream. Copies by ``torch.tensor`` are not detected."""
    if name not in ("copy_", "to", "_to_copy") or result.device.type == "cpu":
        return False
    source = args[1] if name == "copy_" else args[0]
    return source.device.type == "cpu" and not source.is_pinned()
