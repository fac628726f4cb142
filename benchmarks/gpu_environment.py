"""Records the machine's hardware and software, and checks whether the GPU benchmarks can run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_results import Results

_PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest", "flashinfer-python",
             "flash-attn")  # fmt: skip
_SMI_FIELDS = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem",
               "power.limit", "ecc.mode.current", "mig.mode.current")  # fmt: skip


def versions() -> dict[str, Any]:
    """Return the versions of Python and of packages; None for packages that are not installed."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {"python": platform.python_version(), "packages": packages}


def environment(results: Results, *, dry_run: bool) -> None:
    """Add a cell about the machine, and a cell about the device as torch reports it."""
    results.measure("environment", "machine", lambda: _machine(results.folder))
    results.measure("environment", "device", lambda: _device(dry_run))


def _machine(folder: Path) -> dict[str, Any]:
    """Return sizes and versions. ``ok`` is false without a C compiler, which Triton needs."""
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    shared = Path("/dev/shm")
    return {
        "ok": compiler is not None,
        "compiler": compiler,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "free_disk_gb": shutil.disk_usage(folder).free / 1e9,
        "free_shared_memory_gb": shutil.disk_usage(shared).free / 1e9 if shared.exists() else 0.0,
        **versions(),
        "nvidia_smi": _smi(f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv"),
    }


def _smi(*arguments: str) -> str:
    """Return the output of ``nvidia-smi``, or the reason for an empty output."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()


def _device(dry_run: bool) -> dict[str, Any]:
    import torch  # reads torch's files into the page cache, so that later tasks start faster

    facts: dict[str, Any] = {"ok": True, "name": "cpu", "cuda": torch.version.cuda}
    if dry_run:
        return facts
    if not torch.cuda.is_available():
        return facts | {"ok": False, "error": "torch finds no CUDA device"}
    properties = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info(0)
    return facts | {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": properties.total_memory / 1e9,
        "free_gb": free / 1e9,
    }
