"""Times kernels on the shapes of a model's products, once for a model, processor and version.

What was measured is kept in the user's cache folder, beside the compiled C kernels. One thread
computes, and its processor time counts: with more, or by the clock, whoever else uses a core
decides what is measured (seen: a twentieth of the speed, and another kernel ahead).
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
from pathlib import Path

import torch
from torch import nn

from batchinfer.kernels.cpu import library
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.model.quantization import is_plain

Shape = tuple[int, int]
"""Outputs and inputs of a weight."""

_SECONDS = 0.2
"""Time for all of it; the shapes that most is computed with come first."""
_ROWS = (64, 256)
"""Rows of a step that decodes, and of one that computes prompts."""
_ROUNDS = 3
_WEIGHT_ELEMENTS = 1 << 19
"""Of a larger weight so many are multiplied by, in whole rows: 64 rows take half a millisecond."""


def linear_shapes(model: nn.Module, dtype: torch.dtype) -> Counter[Shape]:
    """Number of a model's linear layers by shape."""
    weights = (child.weight for child in model.modules() if is_plain(child))
    return Counter(
        (int(weight.shape[0]), int(weight.shape[1])) for weight in weights if weight.dtype == dtype
    )


def time_kernels(
    kernels: Sequence[LinearKernel], shapes: Mapping[Shape, int], dtype: torch.dtype
) -> dict[str, float]:
    """The speed of each kernel over a model's products on one thread, in GFLOP/s, by name.

    Where there is no folder to keep it in, the kernels are timed in every process.
    """
    path = _cache_path(kernels, shapes, dtype)
    speeds = _read(path, {kernel.name for kernel in kernels})
    if speeds is None:
        speeds = _on_one_thread(kernels, shapes, dtype)
        _write(path, speeds)
    return speeds


def _on_one_thread(
    kernels: Sequence[LinearKernel], shapes: Mapping[Shape, int], dtype: torch.dtype
) -> dict[str, float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(kernels, shapes, dtype)
    finally:
        torch.set_num_threads(threads)


def _measure(
    kernels: Sequence[LinearKernel], shapes: Mapping[Shape, int], dtype: torch.dtype
) -> dict[str, float]:
    """Every kernel over the same shapes: those there is time for."""
    ends = time.perf_counter() + _SECONDS
    work = sorted(shapes, key=lambda shape: -math.prod(shape) * shapes[shape])
    seconds = dict.fromkeys((kernel.name for kernel in kernels), 0.0)
    flops = 0.0
    for shape in work:
        began = time.perf_counter()
        times = _time_shape(kernels, shape, dtype, ends)
        share = shapes[shape] * math.prod(shape)
        for name, flops_per_s in times.items():
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
    """Operations per second of each kernel, in turn, the best round begun before ``ends``."""
    outputs, width = shape
    outputs = max(1, min(outputs, _WEIGHT_ELEMENTS // width))
    weight = torch.linspace(-1, 1, outputs * width).to(dtype).view(outputs, width)
    x = torch.linspace(1, -1, max(_ROWS) * width).to(dtype).view(-1, width)
    packed = {kernel.name: kernel.pack(weight) for kernel in kernels}
    best = {(name, rows): math.inf for name in packed for rows in _ROWS}
    for number in range(1 + _ROUNDS):  # the first makes what a kernel keeps for a shape
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
    """The file for such a model on such a machine; None where there is no folder to write to."""
    folder = library.cache_folder()
    if folder is None:
        return None
    facts = [
        *(str(dtype), torch.__version__, library.source_digest(), Path(__file__).read_text()),
        *(library.processor().hex(), sorted(kernel.name for kernel in kernels)),
        sorted((*shape, count) for shape, count in shapes.items()),
    ]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return folder / f"products-{name}.json"


def _read(path: Path | None, names: set[str]) -> dict[str, float] | None:
    """Stored speeds; None: nothing, or nothing whole."""
    if path is None:
        return None
    try:
        stored = json.loads(path.read_bytes())
        speeds = {str(name): float(value) for name, value in stored.items()}
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
