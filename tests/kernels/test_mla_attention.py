"""Attention to latents equals its reference, whatever the dead parts of the cache hold."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import decode_plan
from batchinfer.kernels.mla_attention import head_tile, mla_attention
from tests.kernels.mla_cases import (
    INTERPRETED_LATENT_CASES,
    LATENT_CASES,
    MLACase,
    build_mla,
    latent_reference,
    work_lists,
)
from tests.kernels.test_paged_attention import TOLERANCE


def check(case: MLACase, device: str, dtype: torch.dtype) -> None:
    arguments = build_mla(case, device, dtype)
    got, expected = arguments["out"], torch.full_like(arguments["out"], float("nan"))
    mla_attention(**arguments, **work_lists(case, arguments))
    latent_reference(**arguments | {"out": expected})
    assert expected.isfinite().all()
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", INTERPRETED_LATENT_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_its_reference(
    case: MLACase, dtype: torch.dtype, interpreter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "DECODE_PIECE", 64)
    check(case, interpreter, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_its_reference_on_a_gpu(case: MLACase, dtype: torch.dtype, gpu: str) -> None:
    check(case, gpu, dtype)


@pytest.mark.parametrize(
    ("heads", "tile"), [(1, 1), (16, 16), (20, 20), (40, 20), (64, 32), (96, 32), (128, 32)]
)
def test_tiles_divide_the_heads(heads: int, tile: int) -> None:
    assert head_tile(heads) == tile
