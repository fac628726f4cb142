"""Weights with 8 and 4 bits: quantization error, and GEMMs with the bits of their reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from batchinfer.kernels.cpu import compiled_library, gemm
from batchinfer.kernels.low_bit import (
    GroupedWeight,
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
    LowBitWeight,
    low_bit_product,
    round_rows,
)
from tests.kernels.cpu_gemm_cases import TOLERANCE, check_low_bit
from tests.kernels.low_bit_cases import LowBitCase, build_low_bit

needs_compiler = pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
cases = st.builds(
    LowBitCase,
    rows=st.integers(0, 40),
    width=st.integers(1, 200).map(lambda half: 2 * half),
    outputs=st.integers(1, 80),
    group_size=st.sampled_from([0, 8, 16, 32, 64, 128, 256]),
    adds=st.booleans(),
    extreme=st.booleans(),
    seed=st.integers(0, 1000),
    table=st.booleans(),
    few_zeros=st.booleans(),
    order=st.booleans(),
    bits=st.sampled_from([4, 8]),
    factors=st.booleans(),
)


@needs_compiler
@given(case=cases, dtype=st.sampled_from(list(TOLERANCE)))
@example(case=LowBitCase(130, 130, 31), dtype=torch.bfloat16)  # threads round rows together
@example(case=LowBitCase(130, 130, 31, 32), dtype=torch.bfloat16)
@example(case=LowBitCase(7, 128, 70, 64, extreme=True, table=True), dtype=torch.float32)
@example(case=LowBitCase(30, 144, 70, 16, factors=True), dtype=torch.bfloat16)
@example(case=LowBitCase(150, 700, 70, 64), dtype=torch.float32)  # several blocks of tiles
@example(case=LowBitCase(35, 808, 40, 128, table=True, few_zeros=True), dtype=torch.bfloat16)
@example(case=LowBitCase(17, 904, 40, 256, order=True), dtype=torch.bfloat16)
def test_low_bit_gemm_has_the_bits_of_its_reference(case: LowBitCase, dtype: torch.dtype) -> None:
    check_low_bit(*build_low_bit(case, dtype))


@needs_compiler
@dtypes
@pytest.mark.parametrize(
    ("group_size", "order", "bits"), [(0, False, 4), (32, False, 4), (32, True, 4), (32, True, 8)]
)
def test_rows_with_nan_or_infinity_do_not_affect_other_rows(
    dtype: torch.dtype, group_size: int, order: bool, bits: int
) -> None:
    case = LowBitCase(6, 70, 40, group_size, order=order, bits=bits)
    x, weight, _, _ = build_low_bit(case, dtype)
    x[0], x[1, 5], x[2, 69], x[3], x[4] = 0.0, torch.inf, torch.nan, 1e-40, -3e38
    check_low_bit(x, weight)
    out = low_bit_product(x, weight)
    assert not out[0].any()
    assert out[1:3].isnan().all()
    assert not out[3].any()
    assert out[5].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("code", [-128, 127, 15, 255])
def test_sums_of_the_largest_codes_do_not_overflow(code: int) -> None:
    """All products have the same sign, so intermediate sums are as large as possible."""
    x = torch.tensor([[1.0], [-1.0]]).expand(2, 256).contiguous()
    zeros, ones = torch.zeros(40, 2, dtype=torch.uint8), torch.ones(40, 2)
    weight: LowBitWeight
    if code in {15, 255}:
        codes = torch.full((40, 256), code, dtype=torch.uint8)
        weight = (Int4Weight if code == 15 else Int8GroupedWeight)(codes, ones, zeros, 128)
    else:
        weight = Int8Weight(torch.full((40, 256), code, dtype=torch.int8), torch.ones(40))
    check_low_bit(x, weight)
    torch.testing.assert_close(low_bit_product(x, weight), x @ weight.dequantized().T)


@needs_compiler
def test_low_bit_gemm_takes_rows_with_gaps() -> None:
    x, weight, bias, onto = build_low_bit(LowBitCase(20, 96, 40), torch.bfloat16)
    wide = torch.zeros(20, 200, dtype=torch.bfloat16)
    wide[:, :96] = x
    check_low_bit(wide[:, :96], weight, bias, onto)


@needs_compiler
def test_rows_are_rounded_half_to_even() -> None:
    halves = torch.arange(-126.5, 127)
    x = torch.cat((halves, torch.tensor([127.0, 0.0])))[None]  # so that the scale is 1
    check_low_bit(x, Int8Weight.rounded(torch.eye(x.shape[1])))


@needs_compiler
def test_pack_low_bit_refuses_unavailable_instructions() -> None:
    for weight in (Int8Weight.rounded(torch.ones(2, 8)), Int4Weight.rounded(torch.ones(2, 8), 8)):
        with pytest.raises(ValueError, match="SSE cannot be used on this machine"):
            gemm.pack_low_bit(weight, "SSE")


def test_int8_quantization_error_is_at_most_half_a_step() -> None:
    weight = torch.randn(30, 100, generator=torch.Generator().manual_seed(0))
    int8 = Int8Weight.rounded(weight)
    assert int8.codes.abs().amax(1).tolist() == [127] * 30
    assert ((int8.dequantized() - weight).abs() <= 0.501 * int8.scales[:, None]).all()
    codes, scales = round_rows(weight)
    assert torch.equal(codes, int8.codes)
    assert torch.equal(scales, int8.scales)


def test_int4_groups_are_clipped_only_if_that_reduces_the_error() -> None:
    weight = torch.randn(30, 100, generator=torch.Generator().manual_seed(0))
    int4 = Int4Weight.rounded(weight, 32)
    assert int4.scales.shape == int4.zeros.shape == (30, 4)
    assert int4.codes.max() == 15
    error = (int4.dequantized() - weight).norm() / weight.norm()
    uniform = torch.rand(30, 96, generator=torch.Generator().manual_seed(0)) - 0.5
    evenly = Int4Weight.rounded(uniform, 32)
    span = uniform.unflatten(1, (3, 32)).amax(-1) - uniform.unflatten(1, (3, 32)).amin(-1)
    assert error < 0.09
    assert (evenly.scales <= span / 15 * 1.001).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_quantization_keeps_groups_with_one_value(value: float) -> None:
    weight = torch.full((2, 40), value)
    for rounded in (Int4Weight.rounded(weight, 32), Int8Weight.rounded(weight)):
        torch.testing.assert_close(rounded.dequantized(), weight)


def test_joined_weights_concatenate_outputs() -> None:
    left, right = torch.randn(2, 3, 64)
    for rounded in (Int8Weight.rounded, lambda weight: Int4Weight.rounded(weight, 32)):
        parts = [rounded(left), rounded(right)]
        joined = type(parts[0]).joined(parts)
        assert torch.equal(joined.dequantized(), torch.cat([p.dequantized() for p in parts]))
    with pytest.raises(ValueError, match=r"groups of \[32, 64\] columns cannot be joined"):
        Int4Weight.joined([Int4Weight.rounded(left, 32), Int4Weight.rounded(left, 64)])


@pytest.mark.parametrize("bits", [4, 8])
def test_permuted_columns_represent_the_same_weight(bits: int) -> None:
    case = LowBitCase(5, 130, 70, 32, order=True, bits=bits)
    x, weight, _, _ = build_low_bit(case, torch.float32)
    assert isinstance(weight, GroupedWeight)
    plain = weight.dequantized()
    in_order = dataclasses.replace(weight, order=None).dequantized()
    assert torch.equal(plain[:, weight.order], in_order)
    wanted = x @ plain.T
    assert (low_bit_product(x, weight) - wanted).norm() < 0.01 * wanted.norm()
    joined = type(weight).joined([weight, weight])
    assert torch.equal(joined.dequantized(), torch.cat([plain, plain]))
    with pytest.raises(ValueError, match="different tables or orders cannot be joined"):
        type(weight).joined([weight, dataclasses.replace(weight, order=weight.order.flip(0))])
    with pytest.raises(ValueError, match="order must be an int32 permutation of 130 columns"):
        dataclasses.replace(weight, order=torch.zeros_like(weight.order))


def test_grouped_weights_refuse_wrong_shapes() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    zeros = torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="group_size is 20; it must be a multiple of 8"):
        Int4Weight(codes, scales, zeros, 20)
    with pytest.raises(ValueError, match=r"group_size is 65544; .*, up to 65536"):
        Int4Weight(codes, scales, zeros, 65544)
    with pytest.raises(ValueError, match=r"zeros are \(4, 1\); they must be \(4, 2\)"):
        Int4Weight(codes, scales, zeros[:, :1], 32)
