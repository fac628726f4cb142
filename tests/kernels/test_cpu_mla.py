"""Attention to latents by the C kernels: values are read out of the keys they begin."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.cpu import paged_attention as cpu_attention
from tests.kernels.cpu_attention_cases import TOLERANCE
from tests.kernels.cpu_mla import CASES, check_latents
from tests.kernels.mla_cases import MLACase

pytestmark = pytest.mark.skipif(
    not cpu_attention.supports(torch.float32), reason="no C compiler here"
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_latents_are_attended_to(case: MLACase, dtype: torch.dtype) -> None:
    check_latents(case, dtype)
