"""Checks of the C GEMM against GEMMs in float64."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.cpu import gemm
from batchinfer.kernels.low_bit import (
    Float8GroupedWeight,
    Int4Weight,
    Int8Weight,
    LowBitWeight,
    low_bit_product,
)

FLOAT8_CASES = [(1, (128, 256), 128), (5, (100, 650), 600), (33, (47, 66), 32), (300, (70, 34), 34)]
"""(rows, (outputs, inputs), columns of a block)"""
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype)
    gemm.gemm(x, gemm.pack(weight), bias, out=out)
    return out


def check_product(dtype: torch.dtype, rows: int, width: int, outputs: int) -> None:
    """Check products with and without a bias, and products added to the output."""
    torch.manual_seed(0)
    x, weight, bias, previous = (
        torch.randn(*s).to(dtype)
        for s in ((rows, width), (outputs, width), (outputs,), (rows, outputs))
    )
    expected = x.double() @ weight.double().T
    assert_close(product(x, weight, None), expected)
    assert_close(product(x, weight, bias), expected + bias.double())
    onto = previous.clone()
    gemm.gemm(x, gemm.pack(weight), bias, out=onto, adds=True)
    assert_close(onto, previous.double() + expected + bias.double())


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


def check_many_rows(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check, for all instructions and 1 and 3 threads, that each row has the same bits as alone."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 66).to(dtype), torch.randn(100, 66).to(dtype)
    packed = [gemm.pack(weight, name) for name in gemm.available(dtype)]
    for low_bit in (Int8Weight.rounded(weight), Int4Weight.rounded(weight, 32)):
        names = gemm.available_low_bit(type(low_bit))
        packed += [gemm.pack_low_bit(low_bit, name) for name in names]
    for each in packed:
        outs = [torch.empty(rows, 100, dtype=dtype) for _ in range(3)]
        for threads, out in zip((1, 3), outs, strict=False):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
            gemm.gemm(x, each, None, out=out)
        for row in range(rows):
            gemm.gemm(x[row : row + 1], each, None, out=outs[2][row : row + 1])
        assert torch.equal(outs[0], outs[2])
        assert torch.equal(outs[1], outs[2])


def check_low_bit(
    x: torch.Tensor,
    weight: LowBitWeight,
    bias: torch.Tensor | None = None,
    onto: torch.Tensor | None = None,
) -> None:
    """Check, for all instructions, that all rows have the bits of the reference."""
    expected = low_bit_product(x, weight, bias, onto)
    for name in gemm.available_low_bit(type(weight)):
        packed = gemm.pack_low_bit(weight, name)
        assert gemm.instructions_of(packed) in ("int8", "groups")
        for rows in (slice(None), slice(len(x) // 2, None)):
            out = torch.full_like(expected, torch.nan) if onto is None else onto.clone()
            gemm.gemm(x[rows], packed, bias, out=out[rows], adds=onto is not None)
            torch.testing.assert_close(out[rows], expected[rows], rtol=0, atol=0, equal_nan=True)


def check_float8(dtype: torch.dtype, rows: int, shape: tuple[int, int], block: int) -> None:
    """Check that the product has the bits of a product with the dequantized weight."""
    random = torch.Generator().manual_seed(0)
    outputs, width = shape
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    codes = every[torch.randint(len(every), shape, generator=random)].view(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 48), -(-width // block), generator=random) + 0.01
    weight = Float8GroupedWeight.of_blocks(codes, scales, (48, block))
    x, bias, previous = (
        torch.randn(*s, generator=random).to(dtype)
        for s in ((rows, width), (outputs,), (rows, outputs))
    )
    plain = gemm.pack(weight.dequantized().to(dtype), gemm.vector_instructions(dtype))
    expected, onto = previous.clone(), previous.clone()
    gemm.gemm(x, plain, bias, out=expected, adds=True)
    packed = gemm.pack_float8(weight, dtype)
    assert packed.numel() <= 1.3 * codes.numel() + 64 * 200, (
        "only codes, scales and padding of panels"
    )
    gemm.gemm(x, packed, bias, out=onto, adds=True)
    assert torch.equal(onto, expected)
