"""Copies arrays to a device in one transfer, and tensors to the host without waiting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # in bytes; enough for every dtype and for vector loads


def to_device(
    arrays: Mapping[str, npt.NDArray[np.generic]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copy arrays to tensors on ``device`` in one transfer. On the CPU, the tensors share memory
    with the arrays."""
    if device.type == "cpu":
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    host = staging.numpy()
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host[offsets[name] : offsets[name] + array.nbytes] = flat
    packed = staging.to(device, non_blocking=True)
    return {
        name: packed[offsets[name] : offsets[name] + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for name, array in arrays.items()
    }


class HostCopy:
    """A copy of a tensor to the host, started by the constructor. A tensor on the CPU is not
    copied. On CUDA, the copy to pinned memory runs in the current stream, followed by an event.
    torch keeps the pinned memory until the copy is done, even if ``wait`` is never called."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> npt.NDArray[np.generic]:
        """Wait for the copy, but not for later work of the stream, and return the array."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[np.generic] = self._host.numpy()
        return array
