"""MLA attention in Triton matches its reference."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.mla_attention import head_tile, mla_attention
from tests.kernels.cases import TOLERANCE
from tests.kernels.mla_cases import (
    INTERPRETED_MLA_CASES,
    MLA_CASES,
    MLACase,
    build_mla,
    mla_reference,
    work_lists,
)


def check(case: MLACase, device: str, dtype: torch.dtype) -> None:
    arguments = build_mla(case, device, dtype)
    got, expected = arguments["out"], torch.full_like(arguments["out"], float("nan"))
    mla_attention(**arguments, **work_lists(case, arguments))
    mla_reference(**arguments | {"out": expected})
    assert expected.isfinite().all()
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", INTERPRETED_MLA_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.usefixtures("short_pieces")
def test_mla_attention_equals_reference(
    case: MLACase, dtype: torch.dtype, interpreter: str
) -> None:
    check(case, interpreter, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MLA_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mla_attention_equals_reference_on_gpu(case: MLACase, dtype: torch.dtype, gpu: str) -> None:
    check(case, gpu, dtype)


@pytest.mark.parametrize(
    ("heads", "tile"), [(1, 1), (16, 16), (20, 20), (40, 20), (64, 32), (96, 32), (128, 32)]
)
def test_head_tiles_divide_the_number_of_heads(heads: int, tile: int) -> None:
    assert head_tile(heads) == tile
