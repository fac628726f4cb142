"""Products by weights of 8 and 4 bits: shapes, and what is in the codes and the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer.kernels.low_bit import Int4Weight, Int8GroupedWeight, Int8Weight, LowBitWeight

Build = tuple[torch.Tensor, LowBitWeight, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class LowBitCase:
    """Shapes of a product.

    Args:
        group_size: of codes; 0: those of 8 bits, each output of which has one scale.
        extreme: codes and rows are the largest and the smallest there are.
    """

    rows: int
    width: int
    outputs: int
    group_size: int = 0
    more: bool = True
    """A bias, and onto what is there."""
    extreme: bool = False
    seed: int = 0
    table: bool = False
    """Codes of 4 bits are places in a table."""
    order: bool = False
    """Codes in groups have their columns in another order."""
    bits: int = 4
    """Of codes in groups."""


LOW_BIT_CASES = [
    LowBitCase(1, 130, 70),
    LowBitCase(7, 130, 70, extreme=True),
    LowBitCase(40, 34, 31, more=False),
    LowBitCase(1, 130, 70, 32),
    LowBitCase(7, 128, 70, 128, extreme=True),
    LowBitCase(40, 34, 31, 8, more=False),
    LowBitCase(130, 130, 31),  # rows that the threads round together
    LowBitCase(130, 130, 31, 32),
    LowBitCase(7, 130, 70, 32, table=True),
    LowBitCase(40, 64, 31, 64, extreme=True, table=True),
    LowBitCase(7, 130, 70, 32, order=True),
    LowBitCase(130, 130, 31, 32, order=True, table=True),
    LowBitCase(1, 130, 70, 32, bits=8),
    LowBitCase(7, 128, 70, 128, extreme=True, bits=8),
    LowBitCase(130, 130, 31, 32, order=True, bits=8),
]


def build_low_bit(case: LowBitCase, dtype: torch.dtype) -> Build:
    """x [rows, width], the weight, a bias [outputs] and what is there [rows, outputs], or None."""
    random = torch.Generator().manual_seed(case.seed)
    x = torch.randn(case.rows, case.width, generator=random)
    if case.extreme:
        x = x.sign()
    more = [
        torch.randn(*shape, generator=random).to(dtype) if case.more else None
        for shape in ((case.outputs,), (case.rows, case.outputs))
    ]
    return x.to(dtype), _weight(case, random), more[0], more[1]


def _weight(case: LowBitCase, random: torch.Generator) -> LowBitWeight:
    """Any codes there are, also those that rounding never makes."""
    shape = case.outputs, case.width
    lowest, highest = (0, 2**case.bits - 1) if case.group_size else (-128, 127)
    codes = torch.randint(lowest, highest + 1, shape, generator=random)
    if case.extreme:
        codes = torch.where(codes > codes.float().mean(), highest, lowest)
    if not case.group_size:
        return Int8Weight(codes.to(torch.int8), torch.rand(case.outputs, generator=random))
    groups = case.outputs, -(-case.width // case.group_size)
    scales = torch.randn(*groups, generator=random)
    zeros = torch.randint(0, min(highest + 2, 256), groups, generator=random).to(torch.uint8)
    order = torch.randperm(case.width, generator=random).int() if case.order else None
    grid = codes.to(torch.uint8), scales, zeros, case.group_size
    if case.bits == 8:
        return Int8GroupedWeight(*grid, order)
    table = None
    if case.table:
        table = torch.randint(-127, 128, (16,), generator=random).to(torch.int8)
        table[0], table[-1] = -127, 127
    return Int4Weight(*grid, order, table)
