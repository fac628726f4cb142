"""The C matrix product: right for any shape, with rows that do not depend on each other."""

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
def test_equals_a_product_in_float64(
    dtype: torch.dtype, rows: int, width: int, outputs: int
) -> None:
    check_product(dtype, rows, width, outputs)


@dtypes
def test_a_row_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    check_rows_do_not_depend_on_each_other(dtype)


@dtypes
@pytest.mark.parametrize("rows", [257, 289])
def test_rows_beyond_those_taken_at_once_have_the_same_bits(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many_rows(dtype, rows, monkeypatch)


@dtypes
def test_rows_may_lie_apart_and_nan_stays_in_its_own(dtype: torch.dtype) -> None:
    wide = torch.randn(20, 96).to(dtype)
    weight = torch.randn(40, 64).to(dtype)
    wide[7, 3] = torch.nan
    out = product(wide[:, :64], weight, None)
    assert out.isnan().any(dim=1).nonzero().tolist() == [[7]]
    clean = [row for row in range(20) if row != 7]
    assert torch.equal(out[clean], product(wide[clean, :64].contiguous(), weight, None))


@dtypes
@pytest.mark.parametrize("rows", [1, 20])
def test_numbers_of_a_row_may_lie_apart(dtype: torch.dtype, rows: int) -> None:
    """As models hand them on: turned, or every second one."""
    turned, wide = torch.randn(64, rows).to(dtype).T, torch.randn(rows, 128).to(dtype)
    weight = torch.randn(40, 64).to(dtype)
    for x in (turned, wide[:, ::2]):
        assert torch.equal(product(x, weight, None), product(x.contiguous(), weight, None))


@dtypes
@pytest.mark.parametrize(("rows", "shape", "block"), FLOAT8_CASES)
def test_float8_is_multiplied_as_the_numbers_it_stands_for(
    dtype: torch.dtype, rows: int, shape: tuple[int, int], block: int
) -> None:
    check_float8(dtype, rows, shape, block)


def test_16_bit_weights_of_odd_width_are_left_to_others() -> None:
    assert not gemm.supports(torch.empty(4, 3, dtype=torch.bfloat16))
    assert not gemm.supports(torch.empty(4, 4, dtype=torch.float16))


@dtypes
def test_a_packed_weight_tells_by_what_it_is_multiplied(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(40, 64).to(dtype)
    names = gemm.available(dtype)
    assert gemm.instructions(dtype) == names[0]
    assert gemm.instructions_of(gemm.pack(weight)) == names[0]
    for name in names:
        packed, out = gemm.pack(weight, name), torch.empty(5, 40, dtype=dtype)
        assert gemm.instructions_of(packed) == name
        gemm.gemm(x, packed, None, out=out)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-2, atol=2e-2)


def test_instructions_that_are_not_here_are_refused() -> None:
    with pytest.raises(ValueError, match="AMX cannot be used here"):
        gemm.pack(torch.empty(2, 2), "AMX")
