"""Fixtures with a fake CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda.compiled import TARGETS, Compiled, compiled_signatures
from tests.fake_cuda.device import FakeCuda


@pytest.fixture(scope="session")
def compiled() -> Compiled:
    """Return the shared memory of the kernels that the compile report compiles, for each target."""
    return {target: compiled_signatures(target) for target in TARGETS}


@pytest.fixture(params=[90])
def fake_cuda(request: pytest.FixtureRequest, compiled: Compiled) -> Iterator[FakeCuda]:
    """Replace ``torch.cuda`` and Triton's launches, and check all work that is queued on the
    device. Parametrize indirectly to choose another compute capability than 90."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a real CUDA device")
    device = FakeCuda(request.param, compiled.get(request.param, {}))
    with device.active():
        yield device
