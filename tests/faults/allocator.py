"""A stand-in for torch's allocator that runs out of memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from batchinfer.worker.model_runner import ModelRunner

TORCH_SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"


class Allocator(TorchDispatchMode):
    """Raises out-of-memory errors in some of torch's operations, which it counts from 0."""

    def __init__(self, fails_at: Collection[int] = ()) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        if self.count - 1 in self.fails_at:
            raise RuntimeError(TORCH_SAYS)
        return func(*args, **kwargs or {})

    def watch_steps(self) -> None:
        """Be active throughout each step from now on, including sampling."""
        start = ModelRunner._start

        def start_watched(runner: ModelRunner, step: Any) -> Any:
            with self:
                return start(runner, step)

        ModelRunner._start = start_watched  # type: ignore[method-assign]
