"""The C matrix product beside one in float64."""

from __future__ import annotations

import torch

from batchinfer.kernels.cpu import gemm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype)
    gemm.gemm(x, gemm.pack(weight), bias, out=out)
    return out


def check_product(dtype: torch.dtype, rows: int, width: int, outputs: int) -> None:
    """With a bias, without, and onto what is there."""
    torch.manual_seed(0)
    x, weight, bias, there = (
        torch.randn(*s).to(dtype)
        for s in ((rows, width), (outputs, width), (outputs,), (rows, outputs))
    )
    expected = x.double() @ weight.double().T
    for given, more in ((None, 0), (bias, bias.double())):
        assert_close(product(x, weight, given), expected + more)
    onto = there.clone()
    gemm.gemm(x, gemm.pack(weight), bias, out=onto, adds=True)
    assert_close(onto, there.double() + expected + bias.double())


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got.double() - expected).norm()
    assert error <= TOLERANCE[got.dtype] * expected.norm() + 1e-9


def check_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(60, 130).to(dtype), torch.randn(70, 130).to(dtype)
    whole = product(x, weight, None)
    for first in range(0, 60, 7):
        for count in (1, 2, 5, 14, 20, 33):
            some = slice(first, first + count)
            assert torch.equal(product(x[some], weight, None), whole[some])
