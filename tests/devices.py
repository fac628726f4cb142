"""The devices that a test runs on: the CPU, and CUDA for tests with the marker ``gpu``."""

from __future__ import annotations

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CPU_AND_CUDA = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
