"""Inputs for comparing linear layers with 4-bit weights with their reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.int4_words import Int4Words
from batchinfer.kernels.low_bit import Int4Weight
from tests.kernels.cases import Case

E2M1_TABLE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]).to(torch.int8)


@dataclass(frozen=True)
class Int4Case(Case):
    """`num_rows` rows times a weight [outputs, width]."""

    num_rows: int
    outputs: int
    width: int
    kind: str = "integers"
    """``integers`` with zero points, ``mxfp4`` or ``nvfp4``."""
    group_size: int = 128
    order: bool = False
    padding: int = 0
    """Elements between the rows of x."""
    bias: bool = False
    adds: bool = False
    pieces: int | None = None


INT4_CASES = (
    Int4Case("one", 1, 1, 1, group_size=8),
    Int4Case("odd", 3, 70, 45, padding=3, bias=True, group_size=16),
    Int4Case("groups_of_32", 17, 130, 200, group_size=32, adds=True),
    Int4Case("groups_of_64", 33, 72, 320, group_size=64, bias=True, adds=True),
    Int4Case("long_groups", 3, 66, 600, group_size=256, bias=True),
    Int4Case("by_row", 3, 66, 300, group_size=304, adds=True),
    Int4Case("more_than_a_tile", 131, 140, 256),
    Int4Case("order", 5, 33, 256, order=True, padding=8),
    Int4Case("pieces", 5, 66, 600, padding=8, bias=True, adds=True, pieces=2),
    Int4Case("mxfp4", 18, 70, 288, "mxfp4", 32, bias=True),
    Int4Case("mxfp4_pieces", 70, 66, 520, "mxfp4", 32, adds=True, pieces=2),
    Int4Case("nvfp4", 3, 70, 176, "nvfp4", 16, bias=True, adds=True),
    Int4Case("nvfp4_pieces", 3, 66, 512, "nvfp4", 16, bias=True, pieces=2),
    Int4Case("no_rows", 0, 16, 128),
)
BIG_INT4_CASES = (
    Int4Case("decode", 1, 4096, 4096, bias=True),
    Int4Case("few_rows", 40, 1024, 3072, adds=True, group_size=32),
    Int4Case("many_rows", 700, 1024, 2048),
    Int4Case("mxfp4_many_rows", 700, 1024, 2048, "mxfp4", 32),
    Int4Case("nvfp4_few_rows", 40, 1024, 2048, "nvfp4", 16),
)


def build_weight(case: Int4Case) -> Int4Weight:
    """Return a weight with random codes. The scales of groups have very different magnitudes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (case.outputs, case.width), generator=generator).to(torch.uint8)
    shape = case.outputs, -(-case.width // case.group_size)
    zeros = torch.zeros(shape, dtype=torch.uint8)
    if case.kind == "integers":
        scales = torch.rand(shape, generator=generator) * 2.0 ** torch.randint(
            -6, 6, shape, generator=generator
        )
        zeros = torch.randint(0, 17, shape, generator=generator).to(torch.uint8)
        order = torch.randperm(case.width, generator=generator).int() if case.order else None
        return Int4Weight(codes, scales, zeros, case.group_size, order)
    if case.kind == "mxfp4":
        powers = 2.0 ** torch.randint(-9, 3, shape, generator=generator)
        return Int4Weight(codes, powers, zeros, case.group_size, table=E2M1_TABLE)
    float8 = torch.randint(0, 127, shape, generator=generator).to(torch.uint8).view(FP8)
    factors = torch.rand(case.outputs, generator=generator) / 512
    return Int4Weight(codes, float8, zeros, case.group_size, table=E2M1_TABLE, factors=factors)


def build_int4(case: Int4Case, device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `int4_linear`. The padding between rows is NaN, and so is `out`
    unless the product is added to it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.full((case.num_rows, case.width + case.padding), torch.nan, dtype=dtype)
    x[:, : case.width] = torch.randn(case.num_rows, case.width, generator=generator)
    out = torch.full((case.num_rows, case.outputs), torch.nan, dtype=dtype)
    if case.adds:
        out = torch.randn(out.shape, generator=generator).to(dtype)
    bias = torch.randn(case.outputs, generator=generator) if case.bias else None
    weight = Int4Words.packed(build_weight(case), dtype)
    tensors = {name: each for name, each in vars(weight).items() if torch.is_tensor(each)}
    return {
        "x": x.to(device)[:, : case.width],
        "weight": replace(weight, **{name: t.to(device) for name, t in tensors.items()}),
        "out": out.to(device),
        "bias": None if bias is None else bias.to(device, dtype),
        "adds": case.adds,
        "pieces": case.pieces,
    }
