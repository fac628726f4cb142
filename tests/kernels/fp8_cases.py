"""Inputs for comparing float8 linear layers with their references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.kernels.fp8_blocks import num_blocks, quantize_blocks
from batchinfer.kernels.reference import quantize_groups
from tests.kernels.cases import Case


@dataclass(frozen=True)
class LinearCase(Case):
    """`num_rows` rows times a weight [outputs, width]."""

    num_rows: int
    outputs: int
    width: int
    padding: int = 0
    """Elements between the rows of x."""
    bias: bool = False
    adds: bool = False
    pieces: int | None = None


LINEAR_CASES = (
    LinearCase("one", 1, 1, 1),
    LinearCase("odd", 3, 70, 45, padding=3, bias=True),
    LinearCase("two_blocks", 17, 130, 128, adds=True),
    LinearCase("last_group_short", 33, 72, 200, bias=True, adds=True),
    LinearCase("more_than_a_tile", 131, 140, 256),
    LinearCase("pieces", 5, 66, 600, padding=8, bias=True, pieces=3),
    LinearCase("pieces_of_many_rows", 70, 129, 520, adds=True, pieces=2),
    LinearCase("no_rows", 0, 16, 128),
)
BIG_LINEAR_CASES = (
    LinearCase("decode", 1, 4096, 4096, bias=True),
    LinearCase("few_rows", 40, 1024, 3072, adds=True),
    LinearCase("many_rows", 700, 1024, 2048),
    LinearCase("grouped_rows", 1300, 640, 768),
)


def build_linear(
    case: LinearCase, device: torch.device | str, dtype: torch.dtype, *, rows_too: bool
) -> dict[str, Any]:
    """Return the arguments of `fp8_linear`.

    Blocks and groups have very different magnitudes. The padding between rows is NaN, and so is
    `out` unless the product is added to it.

    Args:
        rows_too: whether x is float8 too.
    """
    generator = torch.Generator().manual_seed(0)

    def randn(rows: int, columns: int) -> torch.Tensor:
        blocks = (num_blocks(rows), num_blocks(columns))
        sizes = 2.0 ** torch.randint(-6, 6, blocks, generator=generator)
        spread = sizes.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return torch.randn(rows, columns, generator=generator) * spread

    weight, weight_scales = quantize_blocks(randn(case.outputs, case.width).to(device))
    x = torch.full((case.num_rows, case.width + case.padding), torch.nan, dtype=dtype)
    x[:, : case.width] = randn(case.num_rows, case.width)
    x = x.to(device)[:, : case.width]
    out = torch.full((case.num_rows, case.outputs), torch.nan, dtype=dtype)
    if case.adds:
        out = torch.randn(out.shape, generator=generator).to(dtype)
    arguments: dict[str, Any] = {
        "x": x,
        "x_scales": None,
        "weight": weight,
        "weight_scales": weight_scales,
        "out": out.to(device),
        "bias": torch.randn(case.outputs, generator=generator).to(device, dtype)
        if case.bias
        else None,
        "adds": case.adds,
        "pieces": case.pieces,
    }
    if rows_too:
        groups = build_groups(x)
        quantize_groups(**groups)
        arguments |= {"x": groups["codes"], "x_scales": groups["scales"]}
    return arguments


def build_groups(x: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of `quantize_groups`, with outputs filled with NaN."""
    num_rows, width = x.shape
    nan = torch.full((num_rows, width), torch.nan, device=x.device)
    return {
        "x": x,
        "codes": nan.to(torch.float8_e4m3fn),
        "scales": torch.full((num_blocks(width), num_rows), torch.nan, device=x.device),
    }
