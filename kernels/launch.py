"""Launches of this folder's kernels: where one can run, and how it is compiled."""

import functools
from importlib import metadata

import torch
import triton
from triton.runtime import driver

# Triton decides when a kernel is decorated, that is when its module is imported, and not when it is
# launched. Reading the setting here, at import too, keeps this answer the same as Triton's.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Given with every launch. Multiply-adds are fused whatever Triton's default is: it changes after
# 3.9, which warns where the option is left out.
OPTIONS: dict[str, bool] = {"enable_fp_fusion": True}


def check_launchable(name: str, *tensors: torch.Tensor | None) -> None:
    """Check that a kernel can run.

    Raises:
        ValueError: tensors are on several devices.
        RuntimeError: they are on no CUDA device and Triton does not interpret, or cannot beside
            the numpy that is installed.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors on several devices: {sorted(map(str, devices))}")
    (device,) = devices
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(
            f"{name}: tensors are on {device.type!r}, the Triton kernel needs a CUDA device. "
            "Elsewhere use the CPU path, or set TRITON_INTERPRET=1 before triton is imported."
        )
    if INTERPRETED and not can_interpret(triton.__version__, _numpy_version()):
        raise RuntimeError(
            f"{name}: the interpreter of Triton {triton.__version__} fails beside numpy "
            f"{_numpy_version()}; run pip install 'numpy<2.4', or install triton 3.7 or later"
        )


def can_interpret(triton_version: str, numpy_version: str) -> bool:
    """Whether Triton's interpreter works beside a version of numpy.

    Before 3.7 it makes scalars of arrays of one dimension, which numpy refuses from 2.4 on.
    """
    return _release(triton_version) >= (3, 7) or _release(numpy_version) < (2, 4)


@functools.cache
def _numpy_version() -> str:
    return metadata.version("numpy")


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def warps_for(elements: int) -> int:
    """Warps of a program that holds a tile of so many elements: eight or more to a thread."""
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
