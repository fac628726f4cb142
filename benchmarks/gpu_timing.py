"""Seconds a computation takes on the device, and what the device itself can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from roofline import Ceilings

_COPY_BYTES, _MATRIX = 4 * 2**30, 8192


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median of replays of a CUDA graph, so that launches do not count; on a CPU of one run."""
    if device.type == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy bandwidth and matrix rate, on random data."""
    if device.type == "cpu":
        return Ceilings(_copy_rate(device, 2**22), _matrix_rate(device, dtype, 128), 8 * 2**30)
    properties = torch.cuda.get_device_properties(device)
    return Ceilings(
        _copy_rate(device, _COPY_BYTES),
        _matrix_rate(device, dtype, _MATRIX),
        properties.total_memory,
        l2_bytes=properties.L2_cache_size,
    )


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes read plus bytes written, a second."""
    source = torch.randint(0, 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a square product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), device)
