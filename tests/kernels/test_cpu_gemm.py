"""The C matrix product: right for any shape, with rows that do not depend on each other."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.cpu import gemm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
dtypes = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            dtype,
            marks=pytest.mark.skipif(
                not gemm.supports(torch.empty(2, 2, dtype=dtype)), reason="not on this processor"
            ),
        )
        for dtype in TOLERANCE
    ],
    ids=str,
)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype)
    gemm.gemm(x, gemm.pack(weight), bias, out=out)
    return out


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 13, 14, 15, 29, 100])
@pytest.mark.parametrize(("width", "outputs"), [(2, 1), (34, 31), (100, 33), (768, 96)])
def test_equals_a_product_in_float64(
    dtype: torch.dtype, rows: int, width: int, outputs: int
) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*s).to(dtype) for s in ((rows, width), (outputs, width), (outputs,))
    )
    expected = x.double() @ weight.double().T
    for given, more in ((None, 0), (bias, bias.double())):
        error = product(x, weight, given).double() - (expected + more)
        assert error.norm() <= TOLERANCE[dtype] * (expected + more).norm() + 1e-9


@dtypes
def test_a_row_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(60, 130).to(dtype), torch.randn(70, 130).to(dtype)
    whole = product(x, weight, None)
    for first in range(0, 60, 7):
        for count in (1, 2, 5, 14, 20):
            some = slice(first, first + count)
            assert torch.equal(product(x[some], weight, None), whole[some])


@dtypes
def test_rows_may_lie_apart_and_nan_stays_in_its_own(dtype: torch.dtype) -> None:
    wide = torch.randn(20, 96).to(dtype)
    weight = torch.randn(40, 64).to(dtype)
    wide[7, 3] = torch.nan
    out = product(wide[:, :64], weight, None)
    assert out.isnan().any(dim=1).nonzero().tolist() == [[7]]
    clean = [row for row in range(20) if row != 7]
    assert torch.equal(out[clean], product(wide[clean, :64].contiguous(), weight, None))


def test_16_bit_weights_of_odd_width_are_left_to_others() -> None:
    assert not gemm.supports(torch.empty(4, 3, dtype=torch.bfloat16))
    assert not gemm.supports(torch.empty(4, 4, dtype=torch.float16))


@dtypes
def test_adds_onto_what_is_there(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((17, 64), (70, 64), (70,)))
    out = torch.randn(17, 70).to(dtype)
    expected = out.double() + x.double() @ weight.double().T + bias
    gemm.gemm(x, gemm.pack(weight), bias, out=out, adds=True)
    assert (out.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
