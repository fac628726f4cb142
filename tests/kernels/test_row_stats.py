"""Statistics of logits: the kernel equals its twin, and says where a row is not usable."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import reference, row_stats
from tests.kernels.row_cases import build_row_stats

SHAPES = pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 45), (4, 9000), (0, 7)])


def check(num_rows: int, width: int, device: str, dtype: torch.dtype) -> None:
    got, expected = (build_row_stats(num_rows, width, device, dtype) for _ in range(2))
    row_stats.row_stats(**got)
    reference.row_stats(**expected)
    for name in ("maximum", "max_logprob", "argmax"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@SHAPES
def test_equals_its_twin(num_rows: int, width: int, dtype: torch.dtype, interpreter: str) -> None:
    check(num_rows, width, interpreter, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 45, 9000, 151_936])
def test_equals_its_twin_on_a_gpu(width: int, dtype: torch.dtype, gpu: str) -> None:
    check(5, width, gpu, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 20, 8999])
def test_a_row_that_is_not_numbers_has_no_finite_maximum(
    bad: float, at: int, interpreter: str
) -> None:
    arguments = build_row_stats(2, 9000, interpreter, torch.float32)
    arguments["logits"][1, at] = bad
    row_stats.row_stats(**arguments)
    assert arguments["maximum"].isfinite().tolist() == [True, False]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_of_minus_infinity_has_no_finite_maximum(interpreter: str) -> None:
    arguments = build_row_stats(2, 45, interpreter, torch.float32)
    arguments["logits"][0] = -torch.inf
    row_stats.row_stats(**arguments)
    assert arguments["maximum"].isfinite().tolist() == [False, True]
