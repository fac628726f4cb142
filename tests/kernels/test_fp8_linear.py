"""Float8 linear layers and quantization match their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from batchinfer.kernels import fp8_blocks, reference
from batchinfer.kernels.fp8 import FP8, converts_fp8
from batchinfer.kernels.fp8_blocks import quantize_groups
from batchinfer.kernels.fp8_linear import fp8_linear, num_pieces
from batchinfer.kernels.fp8_to_16_bits import widen_words
from tests.kernels.fp8_cases import (
    BIG_LINEAR_CASES,
    LINEAR_CASES,
    LinearCase,
    build_groups,
    build_linear,
)
from tests.kernels.gpu_or_interpreter import on_both

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half of the distance from 1 to the next number of the dtype."""
TENSOR_CORES = 2**-12
"""Error of sums on Hopper's tensor cores, relative to the sum of absolute values: a group of 128
takes four additions, whose inputs are truncated to about 14 bits."""
either = pytest.mark.parametrize("rows_too", [False, True], ids=["16_bit_rows", "float8_rows"])


def tolerance(arguments: dict[str, Any], expected: torch.Tensor, sums: float) -> torch.Tensor:
    """Return the largest error that rounding the result and intermediate sums may cause."""
    sizes = {name: arguments[name] for name in ("weight_scales", "x_scales")}
    sizes |= {name: arguments[name].double().abs() for name in ("x", "weight")}
    total = torch.empty_like(expected)
    reference.fp8_linear(**sizes, out=total)
    if arguments["adds"]:
        total += arguments["out"].abs()
    if arguments["bias"] is not None:
        total += arguments["bias"].abs()
    return ROUNDING[arguments["out"].dtype] * expected.abs() * 1.01 + sums * total + 2**-25


def check(case: LinearCase, device: str, dtype: torch.dtype, *, rows_too: bool) -> None:
    got = build_linear(case, device, dtype, rows_too=rows_too)
    expected = got["out"].double()  # not rounded
    # Products are exact in float32; a row sums `width` of them.
    sums = 2**-24 * (case.width**0.5 * 4 + 4)
    if device == "cuda" and rows_too:
        sums += TENSOR_CORES
    reference.fp8_linear(**got | {"out": expected})
    allowed = tolerance(got, expected, sums)
    fp8_linear(**got)
    assert got["out"].isfinite().all()
    assert ((got["out"].double() - expected).abs() <= allowed).all()


@either
@on_both()
@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_fp8_linear_equals_reference(
    case: LinearCase, dtype: torch.dtype, rows_too: bool, device: str
) -> None:
    check(case, device, dtype, rows_too=rows_too)


@pytest.mark.gpu
@either
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", BIG_LINEAR_CASES, ids=str)
def test_fp8_linear_equals_reference_for_large_shapes_on_gpu(
    case: LinearCase, dtype: torch.dtype, rows_too: bool, gpu: str
) -> None:
    check(case, gpu, dtype, rows_too=rows_too)


@pytest.mark.gpu
@either
def test_fp8_linear_row_bits_do_not_depend_on_other_rows_on_gpu(rows_too: bool, gpu: str) -> None:
    arguments = build_linear(BIG_LINEAR_CASES[1], gpu, torch.bfloat16, rows_too=rows_too)
    fewer = arguments | {"x": arguments["x"][:33], "out": arguments["out"][:33].clone()}
    if rows_too:
        fewer["x_scales"] = arguments["x_scales"][:, :33].contiguous()
    fp8_linear(**arguments)
    fp8_linear(**fewer)
    assert torch.equal(arguments["out"][:33], fewer["out"])


def test_default_pieces_are_never_empty() -> None:
    device = torch.device("cpu")
    assert num_pieces(1, 1024, 3072, device) > 1
    assert num_pieces(8192, 4096, 4096, device) == 1
    for rows in (1, 64, 100, 256):
        for outputs in (64, 1024, 6144, 28672):
            for width in (1, 128, 1024, 1408, 3072, 14336):
                pieces, groups = num_pieces(rows, outputs, width, device), -(-width // 128)
                assert (pieces - 1) * -(-groups // pieces) < groups
    assert num_pieces(1, 4096, 4096, device) == num_pieces(64, 4096, 4096, device)


@triton.jit
def _widen_words(codes_ptr, wide_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.arange(0, SIZE)
    wide = widen_words(tl.load(codes_ptr + places), wide_ptr.dtype.element_ty)
    tl.store(wide_ptr + places, wide)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_widen_words_converts_every_code_on_gpu(dtype: torch.dtype, gpu: str) -> None:
    codes = (torch.arange(1024, device=gpu) % 256).to(torch.uint8)
    codes[codes.view(FP8).isnan()] = 0
    for stored in (codes, *([codes.view(FP8)] if converts_fp8(codes.device) else [])):
        wide = torch.empty(1024, dtype=dtype, device=gpu)
        _widen_words[(1,)](stored, wide, SIZE=1024)
        assert torch.equal(wide, codes.view(FP8).to(dtype))
        assert torch.equal(wide.signbit(), codes >= 128)


def awkward_rows(dtype: torch.dtype) -> torch.Tensor:
    """Return rows with zeros, large and small groups, NaN and infinity, and a short last group."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 300, generator=generator) * 2.0 ** torch.arange(-4, 5)[:, None]
    x[1], x[2, :128], x[3, 128:256] = 0, 0, 1e-7
    x[4, 3], x[5, 130], x[6, 299] = torch.nan, torch.inf, -torch.inf
    x[7] = torch.arange(300) % 449  # includes midpoints between float8 numbers
    x[7, ::128] = 448
    return x.to(dtype)


def check_groups(x: torch.Tensor) -> None:
    got, expected = build_groups(x), build_groups(x)
    quantize_groups(**got)
    reference.quantize_groups(**expected)
    torch.testing.assert_close(got["scales"], expected["scales"], rtol=0, atol=0, equal_nan=True)
    same = got["codes"].view(torch.uint8) == expected["codes"].view(torch.uint8)
    assert (same | (got["codes"].isnan() & expected["codes"].isnan())).all()


@on_both()
def test_quantize_groups_equals_reference(dtype: torch.dtype, device: str) -> None:
    check_groups(awkward_rows(dtype).to(device))
    check_groups(torch.linspace(-3, 3, 2 * 1200).view(2, 1200).to(device, dtype)[:, :1100])


def test_a_group_with_nan_or_infinity_makes_only_its_row_nan(interpreter: str) -> None:
    x = awkward_rows(torch.float32).to(interpreter)
    groups = build_groups(x)
    quantize_groups(**groups)
    weight, weight_scales = fp8_blocks.quantize_blocks(torch.ones(4, 300))
    out = torch.zeros(9, 4)
    fp8_linear(groups["codes"], weight, weight_scales, out=out, x_scales=groups["scales"])
    assert out.isnan().all(1).tolist() == [row in (4, 5, 6) for row in range(9)]


def test_quantize_blocks_error_is_within_float8_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator)
    weight[:128, :128] *= 1e4
    weight[128:256, 128:] = 0
    codes, scales = fp8_blocks.quantize_blocks(weight.bfloat16())
    back = fp8_blocks.dequantize_blocks(codes, scales)
    assert codes.dtype == FP8
    assert scales.shape == (3, 2)
    sizes = weight.bfloat16().float().abs()
    spread = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    # float8 has four significant bits, and rounding errs by half of the last one. Below 2^-6,
    # numbers are 2^-9 apart.
    allowed = (sizes * 2**-4).maximum(spread * 2**-10) * 1.001
    assert ((back - weight.bfloat16().float()).abs() <= allowed).all()
    assert torch.equal(*(fp8_blocks.quantize_blocks(w)[0].float() for w in (weight, 2 * weight)))


def test_block_with_nan_or_infinity_becomes_nan() -> None:
    weight = torch.ones(130, 130)
    weight[3, 4], weight[129, 129] = torch.nan, torch.inf
    back = fp8_blocks.dequantize_blocks(*fp8_blocks.quantize_blocks(weight))
    assert back[:128, :128].isnan().all()
    assert back[128:, 128:].isnan().all()
    assert torch.equal(back[:128, 128:], torch.ones(128, 2))


def test_fp8_linear_refuses_scales_of_wrong_shape(interpreter: str) -> None:
    arguments = build_linear(LINEAR_CASES[2], interpreter, torch.float32, rows_too=True)
    with pytest.raises(ValueError, match=r"scales are \[3, 1\] .*and scales \[2, 1\]"):
        fp8_linear(**arguments | {"weight_scales": torch.ones(3, 1)})
    with pytest.raises(ValueError, match="x_scales are required for float8"):
        fp8_linear(**arguments | {"x_scales": None})
    groups = build_groups(torch.ones(2, 200, device=interpreter))
    with pytest.raises(ValueError, match=r"expected float8_e4m3fn and \[2, 2\]"):
        quantize_groups(**groups | {"scales": torch.ones(3, 2)})


def test_fp8_linear_refuses_tensors_that_are_not_contiguous(interpreter: str) -> None:
    arguments = build_linear(LINEAR_CASES[2], interpreter, torch.float32, rows_too=False)
    x, out = arguments["x"], arguments["out"]
    with pytest.raises(ValueError, match="x is"):
        fp8_linear(**arguments | {"x": x.t().contiguous().t()})
    with pytest.raises(ValueError, match="expected contiguous rows of"):
        fp8_linear(**arguments | {"x": x[:, 1:]})
    with pytest.raises(ValueError, match="out is"):
        fp8_linear(**arguments | {"out": out.t().contiguous().t()})
    groups = build_groups(torch.ones(3, 200, device=interpreter))
    with pytest.raises(ValueError, match="each row of x must be contiguous"):
        quantize_groups(**groups | {"x": torch.ones(200, 3).t()})
