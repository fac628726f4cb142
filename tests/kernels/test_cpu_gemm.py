"""The C GEMM matches float64 up to rounding, and a row's bits do not depend on other rows."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.cpu import compiled_library, gemm
from tests.kernels.cpu_gemm_cases import (
    FLOAT8_CASES,
    TOLERANCE,
    check_float8,
    check_many_rows,
    check_product,
    check_rows_do_not_depend_on_each_other,
    product,
)

pytestmark = pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 13, 14, 15, 29, 100])
@pytest.mark.parametrize(("width", "outputs"), [(2, 1), (34, 31), (100, 33), (768, 96)])
def test_gemm_equals_float64(dtype: torch.dtype, rows: int, width: int, outputs: int) -> None:
    check_product(dtype, rows, width, outputs)


@dtypes
def test_gemm_row_bits_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    check_rows_do_not_depend_on_each_other(dtype)


@dtypes
@pytest.mark.parametrize("rows", [257, 289])
def test_gemm_row_bits_are_the_same_for_many_rows(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many_rows(dtype, rows, monkeypatch)


@dtypes
def test_gemm_takes_rows_with_gaps_and_keeps_nan_in_its_row(dtype: torch.dtype) -> None:
    wide = torch.randn(20, 96).to(dtype)
    weight = torch.randn(40, 64).to(dtype)
    wide[7, 3] = torch.nan
    out = product(wide[:, :64], weight, None)
    assert out.isnan().any(dim=1).nonzero().tolist() == [[7]]
    clean = [row for row in range(20) if row != 7]
    assert torch.equal(out[clean], product(wide[clean, :64].contiguous(), weight, None))


@dtypes
@pytest.mark.parametrize("rows", [1, 20])
def test_gemm_takes_rows_that_are_not_contiguous(dtype: torch.dtype, rows: int) -> None:
    turned, wide = torch.randn(64, rows).to(dtype).T, torch.randn(rows, 128).to(dtype)
    weight = torch.randn(40, 64).to(dtype)
    for x in (turned, wide[:, ::2]):
        assert torch.equal(product(x, weight, None), product(x.contiguous(), weight, None))


@dtypes
@pytest.mark.parametrize(("rows", "shape", "block"), FLOAT8_CASES)
def test_float8_gemm_has_the_bits_of_the_dequantized_weight(
    dtype: torch.dtype, rows: int, shape: tuple[int, int], block: int
) -> None:
    check_float8(dtype, rows, shape, block)


def test_gemm_does_not_support_16_bit_weights_of_odd_width() -> None:
    assert not gemm.supports(torch.empty(4, 3, dtype=torch.bfloat16))
    assert not gemm.supports(torch.empty(4, 4, dtype=torch.float16))


@dtypes
def test_packed_weight_names_its_instructions(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(40, 64).to(dtype)
    names = gemm.available(dtype)
    assert gemm.instructions(dtype) == names[0]
    assert gemm.instructions_of(gemm.pack(weight)) == names[0]
    for name in names:
        packed, out = gemm.pack(weight, name), torch.empty(5, 40, dtype=dtype)
        assert gemm.instructions_of(packed) == name
        gemm.gemm(x, packed, None, out=out)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-2, atol=2e-2)


def test_pack_refuses_unavailable_instructions() -> None:
    with pytest.raises(ValueError, match="AMX cannot be used on this machine"):
        gemm.pack(torch.empty(2, 2), "AMX")
