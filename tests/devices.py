"""The devices that a test runs on: the CPU everywhere, CUDA under the marker ``gpu``."""

from __future__ import annotations

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CPU_AND_CUDA = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
