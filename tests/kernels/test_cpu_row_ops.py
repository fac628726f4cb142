"""The row-wise C kernels match their references, and a row's bits depend on that row alone."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels import reference
from batchinfer.kernels.cpu import compiled_library, row_ops
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from tests.kernels.row_cases import (
    ROTARY_CASES,
    ROW_CASES,
    RotaryCase,
    RowCase,
    build_rms_norm,
    build_rotary_write,
    build_silu_mul,
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}

pytestmark = pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@dtypes
@pytest.mark.parametrize("case", [c for c in ROW_CASES if not c.centered], ids=str)
def test_cpu_rms_norm_equals_reference(case: RowCase, dtype: torch.dtype) -> None:
    got, expected = (build_rms_norm(case, "cpu", dtype) for _ in range(2))
    row_ops.rms_norm(**got)
    reference.rms_norm(**expected)
    assert_close(got["out"], expected["out"])


@dtypes
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_cpu_silu_mul_equals_reference(case: RowCase, dtype: torch.dtype) -> None:
    got, expected = (build_silu_mul(case, "cpu", dtype) for _ in range(2))
    row_ops.silu_mul(**got)
    reference.silu_mul(**expected)
    assert_close(got["out"], expected["out"])


@dtypes
@pytest.mark.parametrize("case", [c for c in ROTARY_CASES if not c.is_for_gpu], ids=str)
def test_cpu_rotary_write_equals_reference(case: RotaryCase, dtype: torch.dtype) -> None:
    _, got = build_rotary_write(case, "cpu", dtype)
    row_ops.rotary_write(**got)
    _, expected = build_rotary_write(case, "cpu", dtype)
    reference.rotary_write(**expected)
    assert_close(got["qkv"], expected["qkv"])
    assert_close(cpu_attention.read_keys(got["key_cache"]), expected["key_cache"])
    assert_close(cpu_attention.read_values(got["value_cache"]), expected["value_cache"])


@dtypes
def test_cpu_sigmoid_mul_equals_reference(dtype: torch.dtype) -> None:
    """Gates lie between other elements, as in the output of a projection of queries and gates."""
    torch.manual_seed(0)
    rows = 20 * torch.randn(70, 3 * 2 * 40).to(dtype)
    gate = rows.unflatten(1, (3, 2, 40))[:, :, 1]
    got = torch.randn(70, 3, 40).to(dtype)
    expected = got.clone()
    row_ops.sigmoid_mul(got, gate)
    reference.sigmoid_mul(expected, gate)
    assert_close(got, expected)


@dtypes
def test_row_bits_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """The width is odd, so that rows have all alignments."""
    case = RowCase("odd", 50, 331)
    for build, function, name in (
        (build_rms_norm, row_ops.rms_norm, "x"),
        (build_silu_mul, row_ops.silu_mul, "gate_up"),
    ):
        whole = build(case, "cpu", dtype)
        function(**whole)
        for row in range(50):
            alone = whole | {
                name: whole[name][row : row + 1].clone(),
                "out": torch.empty_like(whole["out"][:1]),
            }
            function(**alone)
            assert torch.equal(alone["out"][0], whole["out"][row]), (name, row)


def test_nan_and_infinity_do_not_affect_other_rows() -> None:
    arguments = build_silu_mul(RowCase("three", 3, 40), "cpu", torch.float32)
    arguments["gate_up"][1, 7] = torch.nan
    arguments["gate_up"][2, 3] = torch.inf
    row_ops.silu_mul(**arguments)
    finite = arguments["out"].isfinite()
    assert finite.sum(dim=1).tolist() == [40, 39, 39]
    assert arguments["out"][2, 3].isinf()


@dtypes
@pytest.mark.parametrize("width", [1, 31, 32, 1000])
def test_cpu_row_stats_equal_torch(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(9, 2 * width) * 5).round().to(dtype)[:, :width]  # with ties
    logits[3, 0] = -torch.inf
    maximum, max_logprob = torch.full((2, 9), torch.nan)
    argmax = torch.full((9,), -1)
    row_ops.row_stats(logits, maximum=maximum, max_logprob=max_logprob, argmax=argmax)
    values = logits.float()
    assert torch.equal(maximum, values.amax(1))
    usable = maximum.isfinite()
    assert torch.equal(argmax[usable], values.argmax(1)[usable])
    expected = values.log_softmax(1).amax(1)
    torch.testing.assert_close(max_logprob[usable], expected[usable], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_cpu_row_stats_of_rows_with_nan_or_infinity_are_not_finite(
    value: float, place: int
) -> None:
    logits = torch.zeros(3, 100)
    logits[1, place] = value
    maximum, max_logprob = torch.zeros(2, 3)
    argmax = torch.zeros(3, dtype=torch.int64)
    row_ops.row_stats(logits, maximum=maximum, max_logprob=max_logprob, argmax=argmax)
    assert maximum.isfinite().tolist() == [True, False, True]


@dtypes
def test_rms_norm_writes_rows_with_gaps(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype)
    wide, expected = torch.zeros(5, 80, dtype=dtype), torch.empty(5, 64, dtype=dtype)
    row_ops.rms_norm(x, weight, eps=1e-5, out=wide[:, :64])
    row_ops.rms_norm(x, weight, eps=1e-5, out=expected)
    assert torch.equal(wide[:, :64], expected)
    assert not wide[:, 64:].any()
