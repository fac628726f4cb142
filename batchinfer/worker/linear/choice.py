"""Chooses the GEMM kernel of a model's linear layers.

Processors differ: the fastest kernel on one is half as fast on another. So on a CPU kernels are
timed on the model's shapes, once for a model, processor and version; the result is cached in the
user's cache folder, like the compiled C kernels. But a job keeps the kernel that it began with,
and a kernel that is not batch-invariant is never taken for a deterministic job. On a CUDA device
torch multiplies, except for a deterministic job, which uses the batch-invariant kernel.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from batchinfer.console.phases import phase
from batchinfer.errors import DeviceError
from batchinfer.kernels.cpu import compiled_library
from batchinfer.worker.linear_kernels import LinearKernel, linear_kernels, triton_kernel
from batchinfer.worker.model.quantization import is_plain

Shape = tuple[int, int]
"""Outputs and inputs of a weight."""

_WORTH_A_CHANGE = 1.15
"""How much faster another kernel must be than the project's own, which is batch-invariant and runs
whole decoder layers in one call."""
_WORTH_MEASURING = 1 << 22
"""Elements of all weights; for smaller models the choice does not matter."""
_SECONDS = 0.2
"""Time for all measurements; the shapes with most of the computation come first."""
_ROWS = (64, 256)
"""Rows of a typical decode step, and of a typical prompt step."""
_ROUNDS = 3
_WEIGHT_ELEMENTS = 1 << 19
"""A larger weight is cut to this many, in whole outputs: 64 rows take half a millisecond."""
_DTYPE_NAMES = "model.dtype: float32 or bfloat16"


@dataclass(frozen=True)
class KernelRequirements:
    """Requirements on a kernel."""

    kind: str = "auto"
    """``engine.cpu_kernels``."""
    deterministic: bool = False
    """``engine.deterministic``: only batch-invariant kernels."""
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Names of the kernels of the job's earlier runs, by dtype. A deterministic job must use them;
    others use them if they can."""


@dataclass(frozen=True)
class KernelChoice:
    """The chosen kernel and the reason."""

    kernel: LinearKernel | None
    """None: linear layers stay as they are, and torch multiplies."""
    why: str
    gflops: Mapping[str, float] = field(default_factory=dict)
    """Speeds of the kernels that were timed, by name."""

    @property
    def name(self) -> str:
        """The name for users and records."""
        return "torch" if self.kernel is None else self.kernel.name

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits do not depend on the other rows of its step."""
        return self.kernel is not None and self.kernel.is_batch_invariant

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in self.gflops.items())
        measured = f" (GFLOP/s of one thread: {speeds})" if speeds else ""
        keeps = self.kernel is None or self.kernel.is_batch_invariant
        warning = "" if keeps else "; a row's last bits may depend on other rows"
        return f"products by {self.name}: {self.why}{measured}{warning}"


def choose_kernel(
    model: nn.Module, dtype: torch.dtype, required: KernelRequirements
) -> KernelChoice:
    """Choose the kernel for the weights of a model on the CPU.

    Raises:
        DeviceError: this machine has no kernel of the required kind, or no batch-invariant one, or
            not the one of a deterministic job's earlier runs.
    """
    with phase("compiling kernels"):  # once on a machine
        kernels = _allowed(linear_kernels(dtype), dtype, required)
    pinned = required.pinned.get(_dtype_name(dtype))
    for kernel in kernels:
        if kernel.name == pinned:
            return KernelChoice(kernel, "as in earlier runs")
    if pinned is not None and required.deterministic:
        raise _other_bits(pinned)
    choice = _choose(kernels, model, dtype, required)
    if pinned in (None, choice.name):
        return choice
    return replace(choice, why=f"{choice.why}; earlier runs used {pinned}, so bits may differ")


def choose_cuda_kernel(
    device: torch.device, dtype: torch.dtype, required: KernelRequirements
) -> KernelChoice:
    """Choose the kernel for the weights of a model on a CUDA device.

    Raises:
        DeviceError: a deterministic job's earlier runs used a kernel that is not available here.
    """
    if not required.deterministic:
        return KernelChoice(None, "as on any CUDA device")
    kernel, pinned = triton_kernel(device), required.pinned.get(_dtype_name(dtype))
    if pinned is not None and pinned != kernel.name:
        raise _other_bits(pinned)
    return KernelChoice(kernel, _reason(required))


def _other_bits(pinned: str) -> DeviceError:
    return DeviceError(
        "engine.deterministic is true, and the finished rows were computed by "
        f"{pinned}, which does not run on this machine",
        hint="resume on the machine where the job was begun, or start over with --overwrite",
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
            f"nothing else multiplies {_dtype_name(dtype)}; a row's bits may depend on other rows",
        )
    if len(kernels) == 1 or required.deterministic:  # the same in every run, however fast
        return KernelChoice(kernels[0], _reason(required))
    weights = (child.weight for child in model.modules() if is_plain(child))
    shapes = Counter((len(w), w.shape[1]) for w in weights if w.dtype == dtype)
    if sum(math.prod(shape) * count for shape, count in shapes.items()) < _WORTH_MEASURING:
        return KernelChoice(kernels[0], "too few weights to measure others")
    with phase("timing kernels"):
        gflops = time_kernels(kernels, shapes, dtype)
    return KernelChoice(fastest(kernels, gflops), "measured", gflops)


def fastest(kernels: Iterable[LinearKernel], gflops: Mapping[str, float]) -> LinearKernel:
    """The kernel to use: an own one unless another is faster by ``_WORTH_A_CHANGE``."""

    def worth(kernel: LinearKernel) -> float:
        return gflops[kernel.name] * (_WORTH_A_CHANGE if kernel.kind == "own" else 1.0)

    return max(kernels, key=worth)


def _allowed(
    kernels: Iterable[LinearKernel], dtype: torch.dtype, required: KernelRequirements
) -> list[LinearKernel]:
    """The kernels that meet the requirements, ignoring the pinned one.

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
    invariant = [kernel for kernel in found if kernel.is_batch_invariant]
    if not invariant:
        raise DeviceError(
            "engine.deterministic is true, and no batch-invariant kernel multiplies "
            f"{_dtype_name(dtype)} on this machine: a C compiler (cc, or $CC) is needed, and "
            f"{_DTYPE_NAMES}",
            hint="install one, or set engine.deterministic: false",
        )
    return invariant


def _reason(required: KernelRequirements) -> str:
    if required.kind != "auto":
        return f"engine.cpu_kernels is {required.kind}"
    return "engine.deterministic is true" if required.deterministic else "the only one here"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def time_kernels(
    kernels: Sequence[LinearKernel], shapes: Mapping[Shape, int], dtype: torch.dtype
) -> dict[str, float]:
    """Speed of each kernel over a model's linear layers, in GFLOP/s by name; cached if possible.

    Measures the processor time of one thread. With more threads, or by the clock, other processes
    distort the result (seen: a twentieth of the speed, and another kernel ahead).

    Args:
        shapes: the number of linear layers of each shape.
    """
    path = _cache_path(kernels, shapes, dtype)
    speeds = _read(path, {kernel.name for kernel in kernels})
    if speeds is None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            speeds = _measure(kernels, shapes, dtype)
        finally:
            torch.set_num_threads(threads)
        _write(path, speeds)
    return speeds


def _measure(
    kernels: Sequence[LinearKernel], shapes: Mapping[Shape, int], dtype: torch.dtype
) -> dict[str, float]:
    """Time every kernel on the same shapes, until time is up."""
    ends = time.perf_counter() + _SECONDS
    seconds = dict.fromkeys((kernel.name for kernel in kernels), 0.0)
    flops = 0.0
    for shape in sorted(shapes, key=lambda shape: -math.prod(shape) * shapes[shape]):
        began = time.perf_counter()
        share = shapes[shape] * math.prod(shape)
        for name, flops_per_s in _time_shape(kernels, shape, dtype, ends).items():
            seconds[name] += share / flops_per_s
        flops += share
        now = time.perf_counter()
        if now + (now - began) > ends:
            break
    return {name: flops / took / 1e9 for name, took in seconds.items()}


@torch.inference_mode()
def _time_shape(
    kernels: Sequence[LinearKernel], shape: Shape, dtype: torch.dtype, ends: float
) -> dict[str, float]:
    """Operations per second of each kernel in its best round; rounds begin before ``ends``."""
    outputs, width = shape
    outputs = max(1, min(outputs, _WEIGHT_ELEMENTS // width))
    weight = torch.linspace(-1, 1, outputs * width).to(dtype).view(outputs, width)
    x = torch.linspace(1, -1, max(_ROWS) * width).to(dtype).view(-1, width)
    packed = {kernel.name: kernel.pack(weight) for kernel in kernels}
    best = {(name, rows): math.inf for name in packed for rows in _ROWS}
    for number in range(1 + _ROUNDS):  # in the first, kernels prepare for the shape
        if number and time.perf_counter() > ends:
            break
        for (name, rows), shortest_s in best.items():
            began = time.thread_time()
            packed[name].times(x[:rows], None)
            best[name, rows] = min(shortest_s, max(time.thread_time() - began, 1e-9))
    return {
        name: 2.0 * outputs * width / sum(best[name, rows] / rows for rows in _ROWS) * len(_ROWS)
        for name in packed
    }


def _cache_path(
    kernels: Iterable[LinearKernel], shapes: Mapping[Shape, int], dtype: torch.dtype
) -> Path | None:
    """The cache file for these shapes on this machine; None if no folder is writable."""
    folder = compiled_library.cache_folder()
    if folder is None:
        return None
    key = [
        *(
            str(dtype),
            torch.__version__,
            compiled_library.source_digest(),
            Path(__file__).read_text(),
        ),
        *(compiled_library.processor().hex(), sorted(kernel.name for kernel in kernels)),
        sorted((*shape, count) for shape, count in shapes.items()),
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return folder / f"products-{name}.json"


def _read(path: Path | None, names: set[str]) -> dict[str, float] | None:
    """Cached speeds; None if there are none, or the file is damaged."""
    if path is None:
        return None
    try:
        speeds = {str(k): float(v) for k, v in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    is_whole = speeds.keys() == names and all(0 < speed < math.inf for speed in speeds.values())
    return speeds if is_whole else None


def _write(path: Path | None, speeds: Mapping[str, float]) -> None:
    if path is None:
        return
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            new = Path(scratch) / path.name
            new.write_text(json.dumps(speeds))
            os.replace(new, path)
    except OSError:
        return  # measured again next time
