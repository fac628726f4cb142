"""The row-wise Triton kernels: equal to their twins, interpreted and on a GPU."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import reference, rms_norm, rotary_write, silu_mul
from tests.kernels.row_cases import (
    ROTARY_CASES,
    ROW_CASES,
    RotaryCase,
    RowCase,
    build_rms_norm,
    build_rotary_write,
    build_silu_mul,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
interpreted = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
compiled = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
rows = pytest.mark.parametrize("case", ROW_CASES, ids=str)
rotary = pytest.mark.parametrize("case", ROTARY_CASES, ids=str)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_rms_norm(case: RowCase, device: str, dtype: torch.dtype) -> None:
    got, expected = (build_rms_norm(case, device, dtype) for _ in range(2))
    rms_norm.rms_norm(**got)
    reference.rms_norm(**expected)
    assert_close(got["out"], expected["out"])


def check_silu_mul(case: RowCase, device: str, dtype: torch.dtype) -> None:
    got, expected = (build_silu_mul(case, device, dtype) for _ in range(2))
    silu_mul.silu_mul(**got)
    reference.silu_mul(**expected)
    assert_close(got["out"], expected["out"])


def check_rotary_write(case: RotaryCase, device: str, dtype: torch.dtype) -> None:
    pool, got = build_rotary_write(case, device, dtype)
    rotary_write.rotary_write(**got)
    expected_pool, expected = build_rotary_write(case, device, dtype)
    reference.rotary_write(**expected)
    assert_close(got["qkv"], expected["qkv"])
    assert_close(pool, expected_pool)


@interpreted
@rows
def test_rms_norm(case: RowCase, dtype: torch.dtype, interpreter: str) -> None:
    check_rms_norm(case, interpreter, dtype)


@interpreted
@rows
def test_silu_mul(case: RowCase, dtype: torch.dtype, interpreter: str) -> None:
    check_silu_mul(case, interpreter, dtype)


@interpreted
@rotary
def test_rotary_write(case: RotaryCase, dtype: torch.dtype, interpreter: str) -> None:
    check_rotary_write(case, interpreter, dtype)


@pytest.mark.gpu
@compiled
@rows
def test_rms_norm_on_a_gpu(case: RowCase, dtype: torch.dtype, gpu: str) -> None:
    check_rms_norm(case, gpu, dtype)


@pytest.mark.gpu
@compiled
@rows
def test_silu_mul_on_a_gpu(case: RowCase, dtype: torch.dtype, gpu: str) -> None:
    check_silu_mul(case, gpu, dtype)


@pytest.mark.gpu
@compiled
@rotary
def test_rotary_write_on_a_gpu(case: RotaryCase, dtype: torch.dtype, gpu: str) -> None:
    check_rotary_write(case, gpu, dtype)
