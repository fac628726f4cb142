"""Statistics of logits on the CUDA side equal the CPU's."""

from __future__ import annotations

import pytest
import torch

from batchinfer.worker.sampling.logprobs import row_stats
from tests.worker.on_triton import pretend_cuda


def test_row_stats_equal_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[:, ::7] = -torch.inf
    expected = row_stats(logits, 2, want_argmax=True)
    pretend_cuda(monkeypatch)
    got = row_stats(logits, 2, want_argmax=True)
    torch.testing.assert_close(got.maximum, expected.maximum)
    torch.testing.assert_close(got.max_logprob, expected.max_logprob)
    torch.testing.assert_close(got.argmax, expected.argmax)
