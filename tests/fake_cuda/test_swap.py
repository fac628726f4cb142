"""Host memory for swapped blocks is pinned, and copied without waiting."""

from __future__ import annotations

import numpy as np
import torch

from batchinfer.worker.host_blocks import HostBlocks
from tests.fake_cuda.device import FakeCuda


def test_blocks_are_copied_from_and_to_pinned_memory(fake_cuda: FakeCuda) -> None:
    host = HostBlocks(torch.ones(9, 2, 125, device=fake_cuda.device), num_blocks=33)
    pairs = np.array([(0, 31), (4, 32)], dtype=np.int32)
    host.copy(pairs, pairs[:, ::-1])
    assert host.measure() > 0
    assert fake_cuda.pinned_bytes == 2**15 + 2**10
