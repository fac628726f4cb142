"""Helpers for launching Triton kernels: device checks, compile options and numbers of programs."""

import functools

import torch
import triton
from triton.runtime import driver

# Triton reads this setting when it decorates kernels, at import. This module also reads the setting
# at import, so that both use the same value.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Options of every launch. Fusing multiply-adds is the default, but without this option Triton 3.9
# warns that later versions have another default.
OPTIONS: dict[str, bool] = {"enable_fp_fusion": True}

_PERSISTENT_EACH = 4  # programs per multiprocessor
_INTERPRETED = 2  # number of programs in the interpreter, which runs them one after the other


def check_launchable(name: str, *tensors: torch.Tensor | None) -> None:
    """Check that all tensors are on one CUDA device, or that Triton's interpreter is active."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"{name}: the tensors are on several devices: {sorted(map(str, devices))}")
    (device,) = devices
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"{name}: the tensors are on {device.type!r}, but the Triton kernel "
            "needs a CUDA device. On other devices, use the CPU path, or set "
            "TRITON_INTERPRET=1 before triton is imported."
        )


def num_persistent(device: torch.device, most: int) -> int:
    """Return the number of programs for a launch whose programs take items from a work list.

    The number of programs is `most`, or less if fewer programs fill all multiprocessors, whose
    registers hold at most four programs each. Programs that start after the list is empty return
    immediately.
    """
    if device.type != "cuda":
        return min(most, _INTERPRETED)
    return min(most, _PERSISTENT_EACH * num_multiprocessors(device))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return a device's number of multiprocessors, or an H100's number for devices other than
    CUDA."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def warps_for(elements: int) -> int:
    """Return the number of warps for a tile of `elements`, with at least 8 elements per thread."""
    return min(16, max(1, elements // 256))


def compute_capability(device: torch.device) -> int:
    """Return the compute capability to compile for, 90 (which means 9.0) in the interpreter."""
    if device.type == "cuda":
        return _capability_of(device)
    # Without a CUDA device, kernels may still be compiled for a target.
    return 90 if triton.knobs.runtime.interpret else int(driver.active.get_current_target().arch)


@functools.cache
def _capability_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
