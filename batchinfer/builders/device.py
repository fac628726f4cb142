"""Chooses the device of an engine and the number of its threads."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from batchinfer.config import EngineConfig
from batchinfer.errors import DeviceError
from batchinfer.process.cpus import cpu_limits
from batchinfer.worker.threads.threads import TORCH_THREADS, ThreadCount, choose_threads


def choose_device(wanted: str) -> torch.device:
    """Return the torch device for ``engine.device``.

    Raises:
        DeviceError: ``wanted`` is cuda, and there is no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise DeviceError(
            "engine.device is cuda, but torch finds no CUDA device",
            hint="set engine.device to auto or cpu, or install a torch built for CUDA",
        )
    return torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")


def num_gpus() -> int:
    """Return the number of CUDA devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe(device: torch.device) -> str:
    """Return the device's name, for the summary."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads of {os.cpu_count()})"


def set_threads(
    device: torch.device, engine: EngineConfig, log: Callable[[str], None]
) -> ThreadCount | None:
    """On a CPU, set the number of compute threads and return the choice; otherwise return None."""
    if device.type != "cpu":
        return None
    threads = choose_threads(engine.num_threads, cpu_limits(), TORCH_THREADS.default())
    TORCH_THREADS.set(threads.count)
    log(threads.line())
    return threads
