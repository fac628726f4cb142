"""Runs CUDA code on CPU tensors in Triton's interpreter, and records the kernel launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

# These operations allocate memory, and launch no kernel.
_NOT_LAUNCHED = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view",
                 "_reshape_alias", "lift_fresh")  # fmt: skip


def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all tensors report a CUDA device, so that Triton's kernels are called."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


@dataclass(frozen=True)
class Launch:
    """A kernel, and the fixed part of its launch: the grid and the arguments without tensors."""

    name: str
    fixed: tuple[Any, ...] = ()


@dataclass
class Trace(TorchDispatchMode):
    """Records the launches of torch's operations and of Triton's kernels, in order."""

    launches: list[Launch] = field(default_factory=list)
    inside_triton: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        launches = func._schema.is_mutable or not _is_view(result, args)
        if launches and not self.inside_triton and name not in _NOT_LAUNCHED:
            self.launches.append(Launch(name))
        return result

    @property
    def names(self) -> list[str]:
        return [launch.name for launch in self.launches]


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operation copied nothing. ``to`` and ``reshape`` copy only if they must."""
    results = result if isinstance(result, tuple | list) else (result,)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return all(
        isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in storages
        for each in results
    )


def _fixed(argument: Any) -> Any:
    """Return an argument with None in place of tensors, even within tuples."""
    if isinstance(argument, tuple):
        return tuple(map(_fixed, argument))
    return None if isinstance(argument, torch.Tensor) else argument


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Record the launches of the code inside the ``with`` block."""
    trace = Trace()
    execute = GridExecutor.__call__

    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = ((name, _fixed(kwargs[name])) for name in sorted(kwargs))
        fixed = (self.grid, *named, *map(_fixed, args))
        trace.launches.append(Launch(self.fn.__name__, fixed))
        trace.inside_triton = True
        try:
            return execute(self, *args, **kwargs)
        finally:
            trace.inside_triton = False

    with monkeypatch.context() as patched, trace:
        patched.setattr(GridExecutor, "__call__", note)
        yield trace
