from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer.worker.transfer import HostCopy, to_device
from tests.devices import CPU_AND_CUDA

ARRAYS = {
    "ids": np.arange(5, dtype=np.int64),
    "empty": np.empty((0, 2), np.int32),
    "table": np.arange(6, dtype=np.int32).reshape(2, 3),
    "slots": np.array([7, -1], np.int64),
}


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_arrays_are_copied_unchanged(device: str) -> None:
    tensors = to_device(ARRAYS, torch.device(device))
    for name, array in ARRAYS.items():
        assert tensors[name].device.type == device
        np.testing.assert_array_equal(tensors[name].cpu().numpy(), array, strict=True)


def test_on_the_cpu_nothing_is_copied() -> None:
    tensors = to_device(ARRAYS, torch.device("cpu"))
    assert tensors["ids"].data_ptr() == ARRAYS["ids"].ctypes.data


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_host_copy_has_values_from_its_start(device: str) -> None:
    tensor = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    copy = HostCopy(tensor.clone())
    tensor.zero_()
    np.testing.assert_array_equal(copy.wait(), np.arange(6, dtype=np.int32).reshape(2, 3))


def test_on_the_cpu_a_copy_to_the_host_is_the_tensor() -> None:
    tensor = torch.arange(6)
    assert HostCopy(tensor).wait().ctypes.data == tensor.data_ptr()
