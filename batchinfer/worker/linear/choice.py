"""Choice of the kernel that multiplies by a model's weights.

Processors differ: what is fastest on one is half as fast on another. So it is measured, on the
shapes of the model; but rows that were computed by one kernel do not go on with another, and a
kernel whose rows depend on what stands beside them is never taken where that matters. That is for
a CPU; on a CUDA device torch multiplies, but where rows are to keep their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from batchinfer.console.phases import phase
from batchinfer.errors import DeviceError
from batchinfer.worker.linear.timing import Shape, linear_shapes, time_kernels
from batchinfer.worker.linear_kernels import LinearKernel, linear_kernels, triton_kernel

_WORTH_A_CHANGE = 1.15
"""How much faster another kernel must be than the project's own, which keeps a row's bits and runs
whole decoder layers in one call."""
_DTYPE_NAMES = "model.dtype: float32 or bfloat16"
_WORTH_MEASURING = 1 << 22
"""Elements of all weights; the products of a smaller model take no time to speak of."""


@dataclass(frozen=True)
class KernelRequirements:
    """Requirements on a kernel."""

    kind: str = "auto"
    """``engine.cpu_kernels``."""
    deterministic: bool = False
    """``engine.deterministic``: only kernels that keep a row's bits."""
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Names of the kernels that earlier runs of the same job had, by dtype; taken again where they
    can be."""


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that multiplies, and why."""

    kernel: LinearKernel | None
    """None: linear layers stay as they are, and torch multiplies."""
    why: str
    gflops: Mapping[str, float]
    """Of the kernels that were measured, by name."""

    @property
    def name(self) -> str:
        """The name for people and records."""
        return "torch" if self.kernel is None else self.kernel.name

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits do not depend on the other rows of its step."""
        return self.kernel is not None and self.kernel.is_batch_invariant

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in self.gflops.items())
        measured = f" (GFLOP/s of one thread: {speeds})" if speeds else ""
        keeps = self.kernel is None or self.kernel.is_batch_invariant
        warning = "" if keeps else "; a row's last bits may depend on the rows beside it"
        return f"products by {self.name}: {self.why}{measured}{warning}"


def choose_kernel(
    model: nn.Module, dtype: torch.dtype, required: KernelRequirements
) -> KernelChoice:
    """Choose the kernel for the weights of a model on the CPU.

    Raises:
        DeviceError: no kernel here is of the kind that is asked for, or keeps a row's bits, or
            earlier runs of a deterministic job had one that is not here.
    """
    with phase("compiling kernels"):  # once on a machine
        found = linear_kernels(dtype)
    kernels = _allowed(found, dtype, required)
    pinned = required.pinned.get(_dtype_name(dtype))
    for kernel in kernels:
        if kernel.name == pinned:
            return KernelChoice(kernel, "as in the runs before", {})
    if pinned is not None and required.deterministic:
        raise _other_bits(pinned)
    choice = _choose(kernels, model, dtype, required)
    if pinned in (None, choice.name):
        return choice
    return replace(choice, why=f"{choice.why}; runs before had {pinned}, and bits may differ")


def choose_cuda_kernel(
    device: torch.device, dtype: torch.dtype, required: KernelRequirements
) -> KernelChoice:
    """Choose what multiplies by the weights of a model on a CUDA device.

    Raises:
        DeviceError: earlier runs of a deterministic job had a kernel that is not here.
    """
    if not required.deterministic:
        return KernelChoice(None, "as on any CUDA device", {})
    kernel, pinned = triton_kernel(device), required.pinned.get(_dtype_name(dtype))
    if pinned not in (None, kernel.name):
        raise _other_bits(str(pinned))
    return KernelChoice(kernel, _reason(required), {})


def _other_bits(pinned: str) -> DeviceError:
    return DeviceError(
        f"engine.deterministic is true, and the rows that are finished were computed by "
        f"{pinned}, which does not run on this machine",
        hint="go on where the job was begun, or start over with --overwrite",
    )


def _choose(
    kernels: Sequence[LinearKernel],
    model: nn.Module,
    dtype: torch.dtype,
    required: KernelRequirements,
) -> KernelChoice:
    if not kernels:
        return KernelChoice(
            None,
            f"nothing else multiplies {_dtype_name(dtype)}; "
            "a row's bits may depend on those beside it",
            {},
        )
    if len(kernels) == 1 or required.deterministic:  # the same in every run, whatever is measured
        return KernelChoice(kernels[0], _reason(required), {})
    shapes = linear_shapes(model, dtype)
    if sum(map(_elements, shapes.items())) < _WORTH_MEASURING:
        return KernelChoice(kernels[0], "too few weights to measure others", {})
    with phase("timing kernels"):
        gflops = time_kernels(kernels, shapes, dtype)
    return KernelChoice(fastest(kernels, gflops), "measured", gflops)


def fastest(kernels: Iterable[LinearKernel], gflops: Mapping[str, float]) -> LinearKernel:
    """The kernel to take, where one of our own is ahead of others that are a little faster."""

    def worth(kernel: LinearKernel) -> float:
        return gflops[kernel.name] * (_WORTH_A_CHANGE if kernel.kind == "own" else 1.0)

    return max(kernels, key=worth)


def _allowed(
    kernels: Iterable[LinearKernel], dtype: torch.dtype, required: KernelRequirements
) -> list[LinearKernel]:
    """Kernels that meet the requirements.

    Raises:
        DeviceError: there are none.
    """
    found = [kernel for kernel in kernels if required.kind in ("auto", kernel.kind)]
    if required.kind not in ("auto", "torch") and not found:
        needs = "a C compiler (cc, or $CC)" if required.kind == "own" else "oneDNN"
        raise DeviceError(
            f"engine.cpu_kernels is {required.kind}, and no such kernel multiplies "
            f"{_dtype_name(dtype)} on this machine: {needs} is needed, and {_DTYPE_NAMES}",
            hint="install it, choose another model.dtype, or set engine.cpu_kernels: auto",
        )
    if not required.deterministic:
        return found
    kept = [kernel for kernel in found if kernel.is_batch_invariant]
    if not kept:
        raise DeviceError(
            "engine.deterministic is true, and no kernel that keeps a row's bits multiplies "
            f"{_dtype_name(dtype)} on this machine: a C compiler (cc, or $CC) is needed, and "
            f"{_DTYPE_NAMES}",
            hint="install one, or set engine.deterministic: false",
        )
    return kept


def _reason(required: KernelRequirements) -> str:
    if required.kind != "auto":
        return f"engine.cpu_kernels is {required.kind}"
    return "engine.deterministic is true" if required.deterministic else "there is no other here"


def _elements(entry: tuple[Shape, int]) -> int:
    shape, count = entry
    return math.prod(shape) * count


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
