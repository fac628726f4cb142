"""The sampler on a CUDA device gives what it gives on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer.engine.step import StepResult
from batchinfer.worker.sampling.sampler import Sampler
from tests.devices import NEEDS_CUDA
from tests.worker.sampling.sampling_batches import Sample, make_batch

pytestmark = NEEDS_CUDA

SAMPLES = [
    Sample(row=0, temperature=0, logprobs=3),
    Sample(row=1, stream=1, logprobs=0),
    Sample(row=2, stream=2, top_p=0.9),
    Sample(row=2, stream=2, index=1, top_p=0.9, top_k=20),
    Sample(row=3, stream=3, top_k=50, logprobs=2),
    Sample(row=4, stream=4, min_p=0.05, temperature=0.6),
    Sample(row=5, stream=5, bias={7: 4.0, 8: -np.inf}, top_p=0.99),
    Sample(row=6, stream=6, presence=1.0, repetition=1.2, prompt=[1, 2, 3], output=[4, 4]),
    Sample(row=7, stream=7, allowed=[5, 100, 900], logprobs=1),
    Sample(row=8, temperature=0, allowed=[5, 100, 900]),
]


def sample(logits: torch.Tensor) -> StepResult:
    return Sampler()(logits, make_batch(SAMPLES)).result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5003, 151_936])
def test_tokens_and_logprobs_are_the_cpu_s(dtype: torch.dtype, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(9, vocabulary, generator=generator)).to(dtype)
    expected, got = sample(logits), sample(logits.cuda())
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
