"""The row-wise Triton kernels match their references."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import reference, rms_norm, rotary_write, row_stats, silu_mul
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.row_cases import (
    ROTARY_CASES,
    ROW_CASES,
    RotaryCase,
    RowCase,
    build_rms_norm,
    build_rotary_write,
    build_row_stats,
    build_silu_mul,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
rows = pytest.mark.parametrize("case", ROW_CASES, ids=str)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@on_both()
@rows
def test_rms_norm_equals_reference(case: RowCase, dtype: torch.dtype, device: str) -> None:
    got, expected = (build_rms_norm(case, device, dtype) for _ in range(2))
    rms_norm.rms_norm(**got)
    reference.rms_norm(**expected)
    assert_close(got["out"], expected["out"])


@on_both()
@rows
def test_silu_mul_equals_reference(case: RowCase, dtype: torch.dtype, device: str) -> None:
    got, expected = (build_silu_mul(case, device, dtype) for _ in range(2))
    silu_mul.silu_mul(**got)
    reference.silu_mul(**expected)
    assert_close(got["out"], expected["out"])


@on_both()
@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_rotary_write_equals_reference(case: RotaryCase, dtype: torch.dtype, device: str) -> None:
    pool, got = build_rotary_write(case, device, dtype)
    rotary_write.rotary_write(**got)
    expected_pool, expected = build_rotary_write(case, device, dtype)
    reference.rotary_write(**expected)
    assert_close(got["qkv"], expected["qkv"])
    assert_close(pool, expected_pool)


@on_both()
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 45), (4, 9000), (0, 7)])
def test_row_stats_equal_reference(
    num_rows: int, width: int, dtype: torch.dtype, device: str
) -> None:
    got, expected = (build_row_stats(num_rows, width, device, dtype) for _ in range(2))
    row_stats.row_stats(**got)
    reference.row_stats(**expected)
    for name in ("maximum", "max_logprob", "argmax"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 8999])
def test_row_stats_of_rows_with_nan_or_infinity_are_not_finite(
    bad: float, at: int, interpreter: str
) -> None:
    arguments = build_row_stats(2, 9000, interpreter, torch.float32)
    arguments["logits"][1, slice(None) if bad == -torch.inf else at] = bad
    row_stats.row_stats(**arguments)
    assert arguments["maximum"].isfinite().tolist() == [True, False]
