"""Attention to latents by the C kernels: values are read out of the keys they begin."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.cpu import native
from tests.kernels.cpu_attention import TOLERANCE
from tests.kernels.cpu_latents import CASES, check_latents
from tests.kernels.latent_cases import LatentCase

pytestmark = pytest.mark.skipif(not native.supports(torch.float32), reason="no C compiler here")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_latents_are_attended_to(case: LatentCase, dtype: torch.dtype) -> None:
    check_latents(case, dtype)
