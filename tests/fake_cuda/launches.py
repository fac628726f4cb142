"""Records the launches of Triton kernels, and checks their arguments instead of running them."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature, mangle_type

from batchinfer import kernels

MOST_PROGRAMS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
"""Limits of CUDA for the dimensions of a grid."""
MOST_SHARED = {80: 163 * 2**10, 90: 227 * 2**10}
"""Bytes of shared memory that a program has at most, on an A100, and on an H100 or H200."""


class Signature(NamedTuple):
    """What Triton compiles a kernel for, once: the types of arguments, and constants. An integer
    counts as a constant if it is 1. ``D`` marks integers and addresses that are divisible by 16."""

    kernel: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    """Number of warps, and so on."""


class LaunchError(Exception):
    """A launch would fail on a device, or would read memory of the host."""


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel with bound arguments."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    signature: Signature


class _Pointer:
    """The part of a tensor that Triton's signatures depend on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def import_kernels() -> None:
    """Import all kernels, so that Triton decorates none of them while settings are replaced."""
    for module in pkgutil.iter_modules(kernels.__path__):
        if not module.ispkg:
            import_module(f"{kernels.__name__}.{module.name}")
    mangle_type(1)  # imports more of Triton


def launch_of(
    function: InterpretedFunction[Any],
    grid: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    capability: int,
) -> Launch:
    """Bind the arguments of a launch, as Triton does for a device of this compute capability."""
    bound, specialization, left = _binder(function, capability)(
        *map(_with_pointers, args),
        **{name: _with_pointers(value) for name, value in options.items()},
    )
    arguments = options | dict(zip(bound, args, strict=False))
    return Launch(
        kernel=function.__name__,
        grid=tuple(grid(arguments) if callable(grid) else grid),
        arguments={name: arguments.get(name, value) for name, value in bound.items()},
        signature=Signature(
            function.__name__, _hashable(specialization), tuple(sorted(left.items()))
        ),
    )


def check_on_device(launch: Launch) -> None:
    """Check that CUDA can run a launch.

    Raises:
        LaunchError: a tensor is not on the device, or the grid is too large.
    """
    for name, tensor in tensors_of(launch.arguments):
        if tensor.device.type != "cuda":
            raise LaunchError(f"{launch.kernel}: {name} is on {tensor.device}")
    if not all(isinstance(size, int) for size in launch.grid):
        raise LaunchError(f"{launch.kernel}: a size of the grid {launch.grid} is no integer")
    for size, most in zip(launch.grid, MOST_PROGRAMS, strict=False):
        if not 0 < size <= most:
            raise LaunchError(f"{launch.kernel}: CUDA cannot launch a grid of {launch.grid}")


def check_shared(launch: Launch, shared_bytes: int, capability: int) -> None:
    """Check that a device has as much shared memory as a program of a launch needs.

    Args:
        shared_bytes: what the program needs, or 0 if nobody has compiled it.

    Raises:
        LaunchError: the device has less.
    """
    if shared_bytes and shared_bytes > MOST_SHARED[capability]:
        raise LaunchError(
            f"{launch.kernel}: a program needs {shared_bytes} bytes of shared memory, but has at "
            f"most {MOST_SHARED[capability]}"
        )


def tensors_of(arguments: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested arguments, with the name of the argument that holds each."""
    if isinstance(arguments, torch.Tensor):
        yield name, arguments
    elif isinstance(arguments, dict):
        for key, value in arguments.items():
            yield from tensors_of(value, name or key)
    elif isinstance(arguments, tuple | list):
        for value in arguments:
            yield from tensors_of(value, name)


@cache
def _binder(function: InterpretedFunction[Any], capability: int) -> Any:
    compiled = JITFunction(function.fn, **function.kwargs)
    backend = make_backend(GPUTarget("cuda", capability, 32))
    return create_function_from_signature(compiled.signature, compiled.params, backend)


def _with_pointers(value: Any) -> Any:
    """Return an argument with pointers in place of tensors, even within tuples."""
    if isinstance(value, torch.Tensor):
        return _Pointer(value)
    if isinstance(value, tuple):
        values = map(_with_pointers, value)
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    return value


def _hashable(value: Any) -> Any:
    """Return nested tuples in place of lists, and texts in place of Triton's constants."""
    if isinstance(value, tuple | list):
        return tuple(map(_hashable, value))
    return value if isinstance(value, int | float | str | None) else repr(value)
