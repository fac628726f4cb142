"""Fixtures with a fake CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda.device import FakeCuda


@pytest.fixture(params=[90])
def fake_cuda(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    """Replace ``torch.cuda`` and Triton's launches, and check all work that is queued on the
    device. Parametrize indirectly to choose another compute capability than 90."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a real CUDA device")
    device = FakeCuda(request.param)
    with device.active():
        yield device
