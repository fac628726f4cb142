"""Inputs of GEMMs with 8-bit and 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer.kernels.low_bit import Int4Weight, Int8GroupedWeight, Int8Weight, LowBitWeight

Build = tuple[torch.Tensor, LowBitWeight, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class LowBitCase:
    rows: int
    width: int
    outputs: int
    group_size: int = 0  # 0: 8-bit codes with one scale per output
    adds: bool = True  # with a bias, and added to the previous output
    extreme: bool = False  # codes and rows are the largest and the smallest possible
    seed: int = 0
    table: bool = False  # 4-bit codes are indices into a table
    order: bool = False  # columns of grouped codes are permuted
    bits: int = 4  # of a grouped code
    few_zeros: bool = False  # zero points are at most 1, so that tiles can multiply with a table
    factors: bool = False  # 4-bit codes have a table, float8 scales and a factor for each output


def build_low_bit(case: LowBitCase, dtype: torch.dtype) -> Build:
    """Return x [rows, width], weight, bias [outputs] or None, and the previous output or None."""
    random = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.rows, case.width, generator=random)
    if case.extreme:
        x = x.sign()
    terms = [
        torch.randn(*shape, generator=random).to(dtype) if case.adds else None
        for shape in ((case.outputs,), (case.rows, case.outputs))
    ]
    return x.to(dtype), _weight(case, random), terms[0], terms[1]


def _weight(case: LowBitCase, random: torch.Generator) -> LowBitWeight:
    """Return a weight with random codes, including codes that quantization never produces."""
    shape = case.outputs, case.width
    lowest, highest = (0, 2**case.bits - 1) if case.group_size else (-128, 127)
    codes = torch.randint(lowest, highest + 1, shape, generator=random)
    if case.extreme:
        codes = torch.where(codes > codes.float().mean(), highest, lowest)
    if not case.group_size:
        return Int8Weight(codes.to(torch.int8), torch.rand(case.outputs, generator=random))
    groups = case.outputs, -(-case.width // case.group_size)
    scales = torch.randn(*groups, generator=random)
    most_zeros = 1 if case.few_zeros else min(highest + 1, 255)
    zeros = torch.randint(0, most_zeros + 1, groups, generator=random).to(torch.uint8)
    order = torch.randperm(case.width, generator=random).int() if case.order else None
    grid = codes.to(torch.uint8), scales, zeros, case.group_size
    if case.bits == 8:
        return Int8GroupedWeight(*grid, order)
    table = None
    if case.table or case.factors:
        table = torch.randint(-127, 128, (16,), generator=random).to(torch.int8)
        table[0], table[-1] = -127, 127
    if not case.factors:
        return Int4Weight(*grid, order, table)
    # Random bits, but no NaN
    float8 = torch.randint(0, 256, groups, generator=random).to(torch.uint8)
    float8 = torch.where(float8 & 127 == 127, 0, float8).view(torch.float8_e4m3fn)
    factors = torch.randn(case.outputs, generator=random)
    no_zeros = torch.zeros(groups, dtype=torch.uint8)
    return Int4Weight(
        codes.to(torch.uint8), float8, no_zeros, case.group_size, order, table, factors
    )
