"""Free memory of a device and its host."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import torch

from batchinfer.worker.memory import DeviceMemory

_CGROUP = Path("/sys/fs/cgroup")


def device_memory(device: torch.device, loaded_bytes: int) -> DeviceMemory:
    """Return the memory of a device that holds ``loaded_bytes`` of weights."""
    free = free_host_bytes()
    if device.type == "cuda":
        return DeviceMemory("cuda", *torch.cuda.mem_get_info(device), free)
    return DeviceMemory("cpu", free, free + loaded_bytes, free)


def free_host_bytes() -> int:
    """Memory that this process may still take: the host's, or less if its limits say so.

    The limits are of its control group and of its address space (``ulimit -v``). Files in the page
    cache count as free, because the kernel drops them when memory is needed.
    """
    import psutil  # here: the tests of a GPU's kernels run where it is not installed

    free = int(psutil.virtual_memory().available)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, max(0, limit - int(psutil.Process().memory_info().vms)))
    try:
        group_limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):
        return free
    return free if group_limit == "max" else max(0, min(free, int(group_limit) - used + cached))


def return_freed_memory() -> None:
    """Have the C library return freed memory to the system, if it can (glibc).

    Threads that convert weights leave freed memory in arenas of their own, which nothing else uses:
    after packing a dequantized model of 0.2 billion parameters, twice its size.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
