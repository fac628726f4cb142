"""8-bit and 4-bit weights for the C kernels, and a torch reference for the int8 GEMMs.

A GEMM with int8 or 4-bit codes rounds each row of x to int8, scaled so that the row's largest
magnitude becomes 127. Sums of products are integers, so the sums are exact on every processor and
in any order. The few float operations that follow have a fixed order, and each result is rounded to
float32; the sums of groups are added by fused multiply-adds, which round once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.fp8_blocks import BLOCK, quantize_blocks

_INT8_MOST = 127.0
_INT4_MOST = 15
_STEP = 8  # number of codes that the kernels read together; divides the size of a group
# Largest number of columns per group. The sum of more products, each up to 255 * 127, could exceed
# 32 bits.
_MOST = 1 << 16
# A row becomes 0 if its largest magnitude is at most this number, because the inverse of the row's
# scale could overflow.
_SMALLEST = _INT8_MOST * torch.finfo(torch.float32).tiny
_CLIPS = (1.0, 0.92, 0.84)
"""Shares of a group's range to try when rounding. Weights outside the chosen share are clipped."""
_ELEMENTS_AT_ONCE = 1 << 20  # a few float tensors of this size fit into a last-level cache


@dataclass(frozen=True)
class Int8Weight:
    """An int8 weight [out, in] with one scale per output: ``codes * scales``."""

    codes: torch.Tensor
    """[out, in] int8."""
    scales: torch.Tensor
    """[out] float32."""

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> Int8Weight:
        """Quantize a weight [out, in], scaled so that each output's largest magnitude becomes
        127."""
        return cls(*round_rows(weight))

    @classmethod
    def joined(cls, weights: Sequence[Int8Weight]) -> Int8Weight:
        return cls(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
        )

    def dequantized(self) -> torch.Tensor:
        return self.codes * self.scales[:, None]


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in] with a scale and a zero point for each output and group of columns:
    ``(codes - zeros) * scales``."""

    codes: torch.Tensor
    """[out, in] uint8 codes with ``bits`` bits; columns are permuted by ``order``."""
    scales: torch.Tensor
    """[out, groups] float32; the last group may be shorter."""
    zeros: torch.Tensor
    """[out, groups] uint8."""
    group_size: int
    """Columns per group: a multiple of 8, at most 65,536. The last group may have fewer."""
    order: torch.Tensor | None = None
    """[in] int32, contiguous: the weight's column for each column of codes; None: the same
    column."""

    bits: ClassVar[int]

    def __post_init__(self) -> None:
        outputs, width = self.codes.shape
        groups = -(-width // self.group_size)
        if not can_group(self.group_size):
            raise ValueError(
                f"group_size is {self.group_size}; it must be a multiple of {_STEP}, up to {_MOST}"
            )
        if self.order is not None and not _is_permutation(self.order, width):
            raise ValueError(f"order must be an int32 permutation of {width} columns")
        for name in ("scales", "zeros"):
            shape = tuple(getattr(self, name).shape)
            if shape != (outputs, groups):
                raise ValueError(f"{name} are {shape}; they must be ({outputs}, {groups})")

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        """Concatenate the outputs of ``weights``, which must have equal group sizes, tables and
        orders."""
        sizes = {weight.group_size for weight in weights}
        if len(sizes) > 1:
            raise ValueError(f"weights with groups of {sorted(sizes)} columns cannot be joined")
        if len({weight.layout for weight in weights}) > 1:
            raise ValueError("weights with different tables or orders cannot be joined")
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(weight, name) for weight in weights])
            for name in weights[0].by_output
        }
        return replace(weights[0], **tensors)

    @property
    def by_output(self) -> tuple[str, ...]:
        """Names of the tensors whose first dimension is the output."""
        return "codes", "scales", "zeros"

    @property
    def layout(self) -> tuple[object, ...]:
        """The group size and the order. Weights with equal layouts can be joined."""
        return self.group_size, _bytes(self.order)

    def values(self) -> torch.Tensor:
        """Return the numbers that codes stand for before zero points and scales are applied,
        [out, in] int16."""
        return self.codes.short()

    def whole_scales(self) -> torch.Tensor:
        """Return the scales [out, groups] in float32, including all factors."""
        return self.scales

    def dequantized(self) -> torch.Tensor:
        width = self.codes.shape[1]
        spread = [
            t.repeat_interleave(self.group_size, 1)[:, :width]
            for t in (self.whole_scales(), self.zeros)
        ]
        sorted_ = (self.values() - spread[1]) * spread[0]
        if self.order is None:
            return sorted_
        return torch.empty_like(sorted_).index_copy_(1, self.order.long(), sorted_)


@dataclass(frozen=True)
class Int8GroupedWeight(GroupedWeight):
    """A grouped weight with codes from 0 to 255."""

    bits = 8


@dataclass(frozen=True)
class Int4Weight(GroupedWeight):
    """A grouped weight with codes from 0 to 15; with a table, ``(table[codes] - zeros) * scales``;
    with factors, ``table[codes] * scales * factors``."""

    table: torch.Tensor | None = None
    """[16] int8 number for each code, from -127 to 127; None: the code itself."""
    factors: torch.Tensor | None = None
    """[out] float32. A weight with factors has a table, float8 e4m3fn scales without NaN, and zeros
    of 0. None: all 1."""

    bits = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is not None and self.table.shape != (16,):
            raise ValueError(f"table is {tuple(self.table.shape)}; it must be (16,)")
        if self.factors is not None and (
            self.table is None or self.scales.dtype != FP8 or bool(self.zeros.any())
        ):
            raise ValueError("factors need a table, float8_e4m3fn scales, and zeros of 0")

    @classmethod
    def rounded(cls, weight: torch.Tensor, group_size: int) -> Int4Weight:
        """Quantize a weight [out, in]. The codes of a group span the range of its numbers, or a
        slightly smaller range if this reduces the error."""
        step = max(1, _ELEMENTS_AT_ONCE // max(1, weight.shape[1]))
        parts = [_round_groups(part, group_size) for part in torch.split(weight, step)]
        codes, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return cls(codes, scales, zeros, group_size)

    @property
    def layout(self) -> tuple[object, ...]:
        """The group size, the order, the table, and whether there are factors."""
        return *super().layout, _bytes(self.table), self.factors is None

    @property
    def by_output(self) -> tuple[str, ...]:
        return *super().by_output, *(() if self.factors is None else ("factors",))

    def whole_scales(self) -> torch.Tensor:
        if self.factors is None:
            return self.scales
        return self.scales.float() * self.factors[:, None]

    def values(self) -> torch.Tensor:
        return super().values() if self.table is None else self.table[self.codes.int()].short()


@dataclass(frozen=True)
class Float8GroupedWeight:
    """A float8 weight [out, in] with a scale for each output and group of columns:
    ``codes * scales``.

    If several outputs share a scale, the scale is stored for each output.
    """

    codes: torch.Tensor
    """[out, in] float8 e4m3fn, no NaN."""
    scales: torch.Tensor
    """[out, groups] float32; the last group may be shorter."""
    group_size: int
    """Columns per group, an even number; the last group may have fewer."""

    def __post_init__(self) -> None:
        outputs, width = self.codes.shape
        shape = outputs, -(-width // self.group_size)
        if self.codes.dtype != FP8 or tuple(self.scales.shape) != shape:
            raise ValueError(
                f"codes are {list(self.codes.shape)} of {self.codes.dtype} and scales "
                f"{list(self.scales.shape)}; expected float8_e4m3fn and scales {list(shape)}"
            )
        if self.group_size % 2:
            raise ValueError(f"group_size is {self.group_size}; it must be even")

    @classmethod
    def of_blocks(
        cls, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]
    ) -> Float8GroupedWeight:
        """Make a weight from codes with one scale per block.

        Args:
            codes: [out, in] float8 e4m3fn.
            scales: [ceil(out / block[0]), ceil(in / block[1])] float32.
            block: numbers of rows and columns that share a scale.
        """
        by_row = scales.repeat_interleave(block[0], 0)[: len(codes)]
        width = codes.shape[1]
        return cls(codes, by_row.contiguous(), min(block[1], width + width % 2))

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> Float8GroupedWeight:
        """Quantize a weight in blocks of 128 x 128."""
        return cls.of_blocks(*quantize_blocks(weight), (BLOCK, BLOCK))

    @classmethod
    def joined(cls, weights: Sequence[Float8GroupedWeight]) -> Float8GroupedWeight:
        """Concatenate the outputs of ``weights``, which must have equal group sizes."""
        sizes = {weight.group_size for weight in weights}
        if len(sizes) > 1:
            raise ValueError(f"weights with groups of {sorted(sizes)} columns cannot be joined")
        codes, scales = (
            torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scales")
        )
        return cls(codes, scales, sizes.pop())

    def dequantized(self) -> torch.Tensor:
        """Return the weight in float32. (GEMMs with bfloat16 rows round the dequantized weight to
        bfloat16.)"""
        spread = self.scales.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * spread


LowBitWeight = Int8Weight | GroupedWeight


def can_group(group_size: int) -> bool:
    return group_size % _STEP == 0 and group_size <= _MOST


def _bytes(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.numpy().tobytes()


def _is_permutation(order: torch.Tensor, count: int) -> bool:
    if order.dtype != torch.int32 or order.shape != (count,) or not order.is_contiguous():
        return False
    return torch.equal(order.sort().values, torch.arange(count, dtype=torch.int32))


def _round_groups(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, ...]:
    """Quantize a weight [out, in]. Return codes [out, in], scales and zero points [out, groups]."""
    outputs, width = weight.shape
    groups = -(-width // group_size)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group_size - width))
    values = padded.view(outputs, groups, group_size)
    low = values.amin(-1, keepdim=True).clamp_(max=0)
    high = values.amax(-1, keepdim=True).clamp_(min=0)
    least, clips = torch.full_like(low, torch.inf).double(), torch.ones_like(low)
    for clip in _CLIPS:
        inverse, zeros = _grid(low * clip, high * clip)
        exact = values * inverse
        wrong = exact.round().clamp_(-zeros, _INT4_MOST - zeros).sub_(exact).square_()
        # Sum in float64, so that the chosen share does not depend on the order of summation.
        error = wrong.sum(-1, keepdim=True, dtype=torch.float64)
        error *= (high.double() - low).mul_(clip).square_()
        clips = torch.where(error < least, clip, clips)
        least = torch.minimum(error, least)
    inverse, zeros = _grid(low * clips, high * clips)
    codes = (values * inverse).round_().add_(zeros).clamp_(0, _INT4_MOST).to(torch.uint8)
    scales = (high - low) * clips / _INT4_MOST
    codes = codes.view(outputs, -1)[:, :width].contiguous()
    return codes, scales[..., 0], zeros[..., 0].to(torch.uint8)


def _grid(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inverse scales and zero points for groups with numbers from ``low`` to ``high``. The
    inverse scale and the zero point are 0 if ``low`` equals ``high``."""
    span = high - low
    inverse = torch.where(span > 0, _INT4_MOST / span, 0)
    return inverse, (-low * inverse).round_()


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [M, width] to int8. Return the codes [M, width] and their scales [M] float32.

    The scale is max|x| times float32(1 / 127). A row with NaN or infinity gets codes of 0 and a
    scale of NaN.
    """
    x = x.float()
    most = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    usable = most.isfinite() & (most > _SMALLEST)
    # Divide tensor by tensor, because torch computes number / tensor as number * (1 / tensor),
    # which rounds twice.
    inverse = torch.where(usable, most.new_tensor(_INT8_MOST).div(most), 0)
    codes = torch.where(usable[:, None], x * inverse[:, None], 0).round_().to(torch.int8)
    return codes, torch.where(most.isfinite(), most * (1 / _INT8_MOST), torch.nan)


def low_bit_product(
    x: torch.Tensor,  # [M, in]
    weight: LowBitWeight,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
    onto: torch.Tensor | None = None,  # [M, out]
) -> torch.Tensor:
    """Return ``x @ weight.T + bias + onto`` in the dtype of x, with the rows of x rounded to int8.

    This is the reference for ``gemm`` with weights packed by ``pack_low_bit``.
    """
    codes, row_scales = round_rows(x)
    if isinstance(weight, Int8Weight):
        sums = _integer_product(codes, weight.codes)
        out = sums * (row_scales[:, None] * weight.scales)
    else:
        out = _sum_of_groups(codes, weight) * row_scales[:, None]
    for term in (bias, onto):
        if term is not None:
            out = out + term.float()
    return out.to(x.dtype)


def _sum_of_groups(codes: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    if weight.order is not None:
        codes = codes[:, weight.order]
    total = torch.zeros(len(codes), len(weight.codes))
    values = weight.values()
    for group in range(weight.scales.shape[1]):
        columns = slice(group * weight.group_size, (group + 1) * weight.group_size)
        zeros = weight.zeros[:, group, None].short()
        sums = _integer_product(codes[:, columns], values[:, columns] - zeros)
        total = _fma(weight.scales[:, group].float(), sums, total)
    factors = weight.factors if isinstance(weight, Int4Weight) else None
    return total if factors is None else total * factors


def _fma(left: torch.Tensor, right: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
    """Return ``left * right + onto`` of float32 numbers, rounded once.

    The product is exact in float64. The sum is rounded to odd: if it is inexact, the neighbor in
    float64 whose last bit is 1 represents it, so that rounding it to float32 gives the same as
    rounding the exact sum.
    """
    product, added = left.double() * right.double(), onto.double()
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)
    bits = total.view(torch.int64)
    inexact = error.isfinite() & (error != 0) & (bits % 2 == 0)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + away, bits).view(torch.float64).float()


def _integer_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right.T`` of integers, computed exactly in float64 and rounded to float32."""
    return (left.double() @ right.double().T).float()
