"""Chooses the GEMM kernel of a model's linear layers.

The kernel that is fastest on one processor may be slow on another. On a CPU, kernels are therefore
timed on the model's shapes, once for each model, processor and version. The timings are cached in
the user's cache folder, like the compiled C kernels. A resumed job keeps the kernel that it began
with. A deterministic job uses batch-invariant kernels only. On a CUDA device, a deterministic job
uses the batch-invariant Triton kernel, and other jobs use torch.
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
"""A weight's shape: (out_features, in_features)."""

_MIN_SPEEDUP = 1.15
"""Another kernel is chosen only if its speedup over the C kernel is at least this. The C kernel is
preferred because it is batch-invariant and can run whole decoder layers in one call."""
_MIN_TIMED_ELEMENTS = 1 << 22
"""Kernels are timed only for models with at least this number of weight elements. For smaller
models, the choice hardly matters."""
_SECONDS = 0.2
"""Time limit for all measurements, in seconds. The shapes that take the largest share of the
computation are timed first."""
_ROWS = (64, 256)
"""Numbers of rows in a typical decode step, and in a typical prompt step."""
_ROUNDS = 3
_MAX_TIMED_ELEMENTS = 1 << 19
"""Largest number of elements of a timed weight. A larger weight is cut to fewer outputs, so that
multiplying 64 rows takes at most about half a millisecond."""
_DTYPE_NAMES = "model.dtype: float32 or bfloat16"


@dataclass(frozen=True)
class KernelRequirements:
    kind: str = "auto"
    deterministic: bool = False
    """True allows only batch-invariant kernels (``engine.deterministic``)."""
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Names of the kernels that the job's earlier runs used, keyed by dtype. A deterministic job
    must use these kernels; other jobs use them if this machine supports them."""


@dataclass(frozen=True)
class KernelChoice:
    kernel: LinearKernel | None
    """None if torch multiplies by unpacked weights."""
    why: str
    gflops: Mapping[str, float] = field(default_factory=dict)
    """Speeds of the timed kernels in GFLOP/s, keyed by kernel name."""

    @property
    def name(self) -> str:
        return "torch" if self.kernel is None else self.kernel.name

    @property
    def is_batch_invariant(self) -> bool:
        return self.kernel is not None and self.kernel.is_batch_invariant

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in self.gflops.items())
        measured = f" (GFLOP/s of one thread: {speeds})" if speeds else ""
        varies = self.kernel is not None and not self.kernel.is_batch_invariant
        warning = "; the last bits of a row may depend on other rows" if varies else ""
        return f"linear layers use {self.name}: {self.why}{measured}{warning}"


def choose_kernel(
    model: nn.Module, dtype: torch.dtype, required: KernelRequirements
) -> KernelChoice:
    """Choose the kernel for the weights of a model on the CPU.

    Raises:
        DeviceError: this machine lacks a kernel that meets the requirements, or the kernel that a
            deterministic job's earlier runs used.
    """
    with phase("compiling kernels"):  # compiles only the first time on a machine
        kernels = _allowed(linear_kernels(dtype), dtype, required)
    pinned = required.pinned.get(_dtype_name(dtype))
    for kernel in kernels:
        if kernel.name == pinned:
            return KernelChoice(kernel, "as in earlier runs")
    if pinned is not None and required.deterministic:
        raise _pinned_is_missing(pinned)
    choice = _choose(kernels, model, dtype, required)
    if pinned in (None, choice.name):
        return choice
    return replace(choice, why=f"{choice.why}; earlier runs used {pinned}, so bits may differ")


def choose_cuda_kernel(
    device: torch.device, dtype: torch.dtype, required: KernelRequirements
) -> KernelChoice:
    """Choose the kernel for the weights of a model on a CUDA device.

    Raises:
        DeviceError: a deterministic job's earlier runs used a kernel that this device does not
            have.
    """
    if not required.deterministic:
        return KernelChoice(None, "the default on CUDA devices")
    kernel, pinned = triton_kernel(device), required.pinned.get(_dtype_name(dtype))
    if pinned is not None and pinned != kernel.name:
        raise _pinned_is_missing(pinned)
    return KernelChoice(kernel, _reason(required))


def _pinned_is_missing(pinned: str) -> DeviceError:
    return DeviceError(
        "engine.deterministic is true, but the finished rows were computed by "
        f"{pinned}, which does not run on this machine",
        hint="resume on the machine where the job was started, or start over with --overwrite",
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
            f"no other kernel supports {_dtype_name(dtype)}; the bits of a row may "
            "depend on other rows",
        )
    # A deterministic job must not depend on timings.
    if len(kernels) == 1 or required.deterministic:
        return KernelChoice(kernels[0], _reason(required))
    weights = (child.weight for child in model.modules() if is_plain(child))
    shapes = Counter((len(w), w.shape[1]) for w in weights if w.dtype == dtype)
    if sum(math.prod(shape) * count for shape, count in shapes.items()) < _MIN_TIMED_ELEMENTS:
        return KernelChoice(kernels[0], "the model is too small to time kernels")
    with phase("timing kernels"):
        gflops = time_kernels(kernels, shapes, dtype)
    return KernelChoice(fastest(kernels, gflops), "measured", gflops)


def fastest(kernels: Iterable[LinearKernel], gflops: Mapping[str, float]) -> LinearKernel:
    """Return a C kernel, unless another kernel is at least ``_MIN_SPEEDUP`` times as fast."""

    def worth(kernel: LinearKernel) -> float:
        return gflops[kernel.name] * (_MIN_SPEEDUP if kernel.kind == "own" else 1.0)

    return max(kernels, key=worth)


def _allowed(
    kernels: Iterable[LinearKernel], dtype: torch.dtype, required: KernelRequirements
) -> list[LinearKernel]:
    """Return the kernels that meet the requirements, without regard to the pinned kernel.

    Raises:
        DeviceError: no kernel meets them.
    """
    suitable = [kernel for kernel in kernels if required.kind in ("auto", kernel.kind)]
    if required.kind not in ("auto", "torch") and not suitable:
        needs = "a C compiler (cc, or $CC)" if required.kind == "own" else "oneDNN"
        raise DeviceError(
            f"engine.cpu_kernels is {required.kind}, but this machine has no such "
            f"kernel for {_dtype_name(dtype)}, which needs {needs} and "
            f"{_DTYPE_NAMES}",
            hint=f"install {needs}, choose another model.dtype, or set engine.cpu_kernels: auto",
        )
    if not required.deterministic:
        return suitable
    invariant = [kernel for kernel in suitable if kernel.is_batch_invariant]
    if not invariant:
        raise DeviceError(
            "engine.deterministic is true, but this machine has no batch-invariant "
            f"kernel for {_dtype_name(dtype)}, which needs a C compiler (cc, or "
            f"$CC) and {_DTYPE_NAMES}",
            hint="install a C compiler, choose another model.dtype, or set "
            "engine.deterministic: false",
        )
    return invariant


def _reason(required: KernelRequirements) -> str:
    if required.kind != "auto":
        return f"engine.cpu_kernels is {required.kind}"
    return (
        "engine.deterministic is true"
        if required.deterministic
        else "the only kernel on this machine"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def time_kernels(
    kernels: Sequence[LinearKernel], shapes: Mapping[Shape, int], dtype: torch.dtype
) -> dict[str, float]:
    """Measure the speed of each kernel for a model's linear layers. Return GFLOP/s, keyed by kernel
    name.

    The processor time of one thread is measured. Wall time and the time of several threads also
    depend on other processes, which once made a slower kernel win. Results are cached.

    Args:
        shapes: number of linear layers, keyed by shape.
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
    """Return the operations per second of each kernel in its best round. No round begins after
    ``ends``."""
    outputs, width = shape
    outputs = max(1, min(outputs, _MAX_TIMED_ELEMENTS // width))
    weight = torch.linspace(-1, 1, outputs * width).to(dtype).view(outputs, width)
    x = torch.linspace(1, -1, max(_ROWS) * width).to(dtype).view(-1, width)
    packed = {kernel.name: kernel.pack(weight) for kernel in kernels}
    best = {(name, rows): math.inf for name in packed for rows in _ROWS}
    # The first round is a warm-up, in which kernels prepare for the shape.
    for number in range(1 + _ROUNDS):
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
    """Return the cache file for these shapes; None if no cache folder is writable."""
    folder = compiled_library.cache_folder()
    if folder is None:
        return None
    key = [
        *(str(dtype), torch.__version__, Path(__file__).read_text()),
        *(compiled_library.source_digest(), compiled_library.processor().hex()),
        sorted(kernel.name for kernel in kernels),
        sorted((*shape, count) for shape, count in shapes.items()),
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    return folder / f"linear-kernels-{name}.json"


def _read(path: Path | None, names: set[str]) -> dict[str, float] | None:
    """Return cached speeds, or None."""
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
        return  # nothing is cached, so the next run measures again
