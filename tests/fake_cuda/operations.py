"""Watches the operations of torch: which may run while a step is queued, or captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.fake_cuda.captures import Recording
from tests.fake_cuda.launches import tensors_of
from tests.fake_cuda.torch_cuda import PinnedMemory

_READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"})
_MOVES = frozenset({"copy_", "to", "_to_copy"})


class DeviceError(Exception):
    """An operation makes the host wait for the device, or cannot be captured."""


class Phase(Enum):
    """How strict the rules are."""

    LOADING = "loading"
    """The host may wait. Everything that it reads is true, or 1."""
    STEP = "step"
    """The host does not wait: it reads nothing from the device, and only copies pinned memory."""
    CAPTURE = "capture"
    """In addition, nothing is copied between host and device."""


class Operations(TorchDispatchMode):
    """Applies the rules of a phase to torch's operations on a device without contents."""

    def __init__(self, pinned: PinnedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = Phase.STEP
        self.recording: Recording | None = None
        self._pinned = pinned

    @contextmanager
    def rules_of(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Apply the rules of captures inside the ``with`` block, and record the queued work."""
        recording = self.recording = Recording()
        try:
            with self.rules_of(Phase.CAPTURE):
                yield recording
        finally:
            self.recording = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [tensor for _, tensor in tensors_of((args, kwargs))]
        on_device = any(tensor.is_cuda for tensor in tensors)
        if name in _READS and on_device:
            return self._read(name, tensors[0])
        if func.is_view and name not in _MOVES and any(map(self._pinned.holds, tensors)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if name == "_grouped_mm":  # torch's own shape function refuses all dtypes but bfloat16
            result = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            result = func(*map(_without_contents, args), **kwargs)
        if name == "copy_":
            result = args[0]
        results = [tensor for _, tensor in tensors_of(result)]
        if self.phase is not Phase.LOADING and (on_device or any(t.is_cuda for t in results)):
            self._check(name, args, tensors, results)
        if self.recording is not None and func.namespace == "aten":
            self.recording.call(name, args, kwargs, results)
        return result

    def _read(self, name: str, tensor: torch.Tensor) -> Any:
        if self.phase is not Phase.LOADING:
            raise DeviceError(f"{name}: the host reads from the device")
        return True if name in _READS - {"item", "_local_scalar_dense"} else _one(tensor.dtype)

    def _check(
        self, name: str, args: Any, tensors: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        indices = tensors_of(args[1:2]) if name.startswith("index") else ()
        if any(index.dtype is torch.bool for _, index in indices):
            raise DeviceError(f"{name}: the size of a mask's selection is on the device")
        hosts = [t for t in (*tensors, *results) if not t.is_cuda and t.dim() > 0]
        for host in hosts:
            if name not in _MOVES or not self._pinned.holds(host):
                raise DeviceError(f"{name}: the host's memory {tuple(host.shape)} is not pinned")
            if self.phase is Phase.CAPTURE:
                raise DeviceError(f"{name}: a graph would freeze an address of the host")


def _without_contents(value: Any) -> Any:
    """Return a fake tensor in place of a tensor of the host. Torch would run operations that have
    only such arguments."""
    is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) if is_real else value


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
