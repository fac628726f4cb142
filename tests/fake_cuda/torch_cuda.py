"""Replaces ``torch.cuda`` with a device that has no contents, in a torch without CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

TOTAL_BYTES = 80 * 2**30
NUM_MULTIPROCESSORS = 132

_NUM_DEVICE_TYPES = 20
_CUDA, _LAZY = 1, 17  # c10::DeviceType


@contextmanager
def device_guard() -> Iterator[None]:
    """Let torch's C++ code switch to CUDA devices, which does nothing.

    Without CUDA, torch refuses to index a tensor that is on a CUDA device. Torch itself has a guard
    that does nothing, and registers it if the guard of CUDA counts no devices. The guard of lazy
    tensors counts none either, so it stands in for the guard of CUDA.
    """
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    registry: Any = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(
        ctypes.CDLL(str(path)), "_ZN3c104impl26device_guard_impl_registryE"
    )
    before = registry[_CUDA]
    registry[_CUDA] = registry[_LAZY]
    torch._C._ensureCUDADeviceGuardSet()
    assert registry[_CUDA] != registry[_LAZY], "torch registered no guard for CUDA devices"
    try:
        yield
    finally:
        registry[_CUDA] = before


class Stream:
    """A stream or an event, which never has work left."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = record_event = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Stream) -> float:
        return 1.0


class PinnedMemory:
    """Real memory for pinned tensors, because the host reads and writes their contents.

    Copies from the device leave zeros there.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.zeros(shape, dtype=dtype)
        self._storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations, which torch rounds up to powers of two."""
        return sum(1 << (tensor.nbytes - 1).bit_length() for tensor in self._storages.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return False
        return tensor.untyped_storage().data_ptr() in self._storages


def replace_torch_cuda(
    monkeypatch: pytest.MonkeyPatch, capability: int, pinned: PinnedMemory
) -> None:
    """Make ``torch.cuda`` describe a device of a compute capability, such as 90."""
    properties = SimpleNamespace(
        multi_processor_count=NUM_MULTIPROCESSORS,
        total_memory=TOTAL_BYTES,
        major=capability // 10,
        minor=capability % 10,
        name="fake",
    )
    stream = Stream()
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": divmod(capability, 10),
        "get_device_properties": properties,
        "get_device_name": "fake",
        "mem_get_info": (TOTAL_BYTES, TOTAL_BYTES),
        "memory_allocated": 0,
        "empty_cache": None,
        "synchronize": None,
        "manual_seed_all": None,
        "get_rng_state": None,
        "set_rng_state": None,
        "get_sync_debug_mode": 0,
        "set_sync_debug_mode": None,
        "current_stream": stream,
        "stream": nullcontext(),
        "graph_pool_handle": (0, 1),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, _answering(answer))
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    # This function would allocate memory of a real device.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", _answering(None))
    monkeypatch.setattr(FakeTensor, "data_ptr", _address, raising=False)
    # Modules treat weights of other types than torch.Tensor as quantized.
    monkeypatch.setattr(FakeTensor, "dequantize", lambda tensor: tensor, raising=False)
    monkeypatch.setattr(FakeTensor, "__deepcopy__", _copied, raising=False)
    monkeypatch.setattr(torch.nn.Module, "_apply", _moving_parameters())
    empty = torch.empty

    def empty_or_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return empty(*size, **options)
        shape = size[0] if len(size) == 1 else size
        return pinned.empty(shape, options.get("dtype", torch.float32))

    monkeypatch.setattr(torch, "empty", empty_or_pinned)
    monkeypatch.setattr(torch.Tensor, "is_pinned", pinned.holds)
    monkeypatch.setattr(torch.Tensor, "numpy", on_the_host(torch.Tensor.numpy))
    monkeypatch.setattr(torch, "from_numpy", on_the_host(torch.from_numpy))


def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes and reads real tensors, with contents, on the host."""

    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return call


def _address(tensor: torch.Tensor) -> int:
    """Return an address that is aligned to 512 bytes at the start of each allocation, as in torch's
    allocator."""
    start = int(tensor.untyped_storage()._cdata) * 512
    return start + tensor.storage_offset() * tensor.element_size()


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copied, False) if is_parameter else copied
    return memo[id(tensor)]


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _moving_parameters() -> Callable[..., torch.nn.Module]:
    """Return a function for ``Module._apply`` that replaces parameters. Torch would swap their
    contents, which fake tensors do not support if they were used before."""
    moved: dict[Any, Any] = {}  # a parameter that modules share is moved once

    def apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            apply(child, function)
        for members in (module._parameters, module._buffers):
            for name, old in members.items():
                new = old if old is None else function(old)
                if new is not old:
                    is_parameter = isinstance(old, torch.nn.Parameter)
                    new = torch.nn.Parameter(new, requires_grad=False) if is_parameter else new
                    members[name] = moved.setdefault((old, new.dtype, new.device), new)
        return module

    return apply
