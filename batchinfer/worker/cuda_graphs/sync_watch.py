"""Finds operations that make the host wait for the device. CUDA graphs cannot capture them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result is on the host, or has a size that depends on data on the device.
_WAITS = frozenset(
    [
        *("_local_scalar_dense", "allclose", "equal", "is_nonzero", "item"),
        *("argwhere", "nonzero", "nonzero_numpy", "masked_select", "one_hot", "bincount"),
        *("_unique2", "unique_consecutive", "unique_dim"),
    ]
)
# Major compute capabilities for which torch has a bfloat16 kernel that multiplies all experts. On
# other devices, torch reads each expert's number of rows on the host, and multiplies the experts
# one by one.
_GROUPED_MM_MAJORS = (9, 10)
_HOST_WAITS = "the model makes the host wait for the device"
_SYNC_ERROR = "called a synchronizing CUDA operation"


class WaitsForDeviceError(Exception):
    """A forward pass makes the host wait for the device, so it cannot be captured."""


def run_without_waits(run: Callable[[], object]) -> None:
    """Run a computation, and check that it does not wait for the device."""
    with SyncWatch() as watch, _waits_raise():
        run()
    if watch.seen:
        seen = ", ".join(sorted(watch.seen))
        raise WaitsForDeviceError(f"{_HOST_WAITS} ({seen})")


@contextmanager
def _waits_raise() -> Iterator[None]:
    """Make torch raise an error when an operation waits for the device internally, where
    ``SyncWatch`` cannot see it."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if _SYNC_ERROR in str(error):
            raise WaitsForDeviceError(f"{_HOST_WAITS} ({error})") from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode(before)


class SyncWatch(TorchDispatchMode):
    """While active, records the names of torch operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if (
            (_reads_a_size(name, func._overloadname, args, kwargs) and _are_on_device(args))
            or _comes_to_host(args, result)
            or _leaves_pageable_memory(name, args, result)
        ):
            self.seen.add(name)
        return result


def _reads_a_size(name: str, overload: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return true if the operation's result is a number on the host, or a tensor whose size depends
    on data on the device."""
    if name == "where":
        return len(args) == 1
    if name == "repeat_interleave":  # self_int repeats all elements equally often
        return overload != "self_int" and kwargs.get("output_size") is None
    if name == "_grouped_mm":
        return not _is_grouped_mm_captured(args[0])
    return name in _WAITS or (name.startswith("index") and _has_mask(args))


def _is_grouped_mm_captured(rows: torch.Tensor) -> bool:
    if rows.device.type != "cuda":
        return True
    major, _ = torch.cuda.get_device_capability(rows.device)
    return rows.dtype is torch.bfloat16 and major in _GROUPED_MM_MAJORS


def _are_on_device(args: Any) -> bool:
    """Return true if an argument is on a CUDA device. Reading host memory does not wait."""
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(at, torch.Tensor) and at.dtype is torch.bool for at in indices)


def _comes_to_host(args: Any, result: Any) -> bool:
    first = args[0] if args else None
    if not (isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    return first.device.type != "cpu" and result.device.type == "cpu"


def _leaves_pageable_memory(name: str, args: Any, result: Any) -> bool:
    """Return true if the operation copies from pageable memory to the device, which makes the host
    wait for the stream. Copies that ``torch.tensor`` makes are not detected."""
    if name not in ("copy_", "to", "_to_copy") or result.device.type == "cpu":
        return False
    source = args[1] if name == "copy_" else args[0]
    return source.device.type == "cpu" and not source.is_pinned()
