"""Launches of this folder's kernels: where a kernel can run, and how it is compiled."""

import functools

import torch
import triton
from triton.runtime import driver

# Triton decides when a kernel is decorated, that is when its module is imported, and not when it is
# launched. Reading the setting here, at import too, keeps this answer the same as Triton's.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Passed to every launch: multiply-adds are fused. Triton's default changes after 3.9, which warns
# where the option is missing.
OPTIONS: dict[str, bool] = {"enable_fp_fusion": True}

_PERSISTENT_EACH = 4  # programs for each multiprocessor
_INTERPRETED = 2  # programs of the interpreter, one after the other


def check_launchable(name: str, *tensors: torch.Tensor | None) -> None:
    """Raise unless all tensors are on one CUDA device, or Triton interprets."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors on several devices: {sorted(map(str, devices))}")
    (device,) = devices
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"{name}: tensors are on {device.type!r}, the Triton kernel needs a CUDA device. "
            "Elsewhere use the CPU path, or set TRITON_INTERPRET=1 before triton is imported."
        )


def num_persistent(device: torch.device, most: int) -> int:
    """Programs of a launch in which each takes item after item of a work list, at most `most`.

    Four fill a multiprocessor as far as registers allow, or further: a program that starts when the
    list is empty returns at once.
    """
    if device.type != "cuda":
        return min(most, _INTERPRETED)
    return min(most, _PERSISTENT_EACH * num_multiprocessors(device))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; of one that is not there as many as an H100 has."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def warps_for(elements: int) -> int:
    """Warps of a program that holds a tile of `elements`: eight or more to a thread."""
    return min(16, max(1, elements // 256))


def compute_capability(device: torch.device) -> int:
    """Compute capability that kernels are compiled for: 90 is 9.0. The interpreter's is as well."""
    if device.type == "cuda":
        return _capability_of(device)
    # A device that is not there, to compile for.
    return 90 if triton.knobs.runtime.interpret else int(driver.active.get_current_target().arch)


@functools.cache
def _capability_of(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
