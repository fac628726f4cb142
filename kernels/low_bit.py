"""Weights of 8 and 4 bits, and products by them in torch, with the bits of the C kernels.

A row of x is rounded to int8 when it is multiplied, its largest number becoming 127. Sums of
products are integers, so that they are the same on every processor and in every order; the few
operations on floats that follow have one order, each rounded to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

_INT8_MOST = 127.0
_INT4_MOST = 15
_STEP = 8  # codes that are read together: a group has a multiple of it
_MOST = 1 << 16  # columns of a group: 255 * 127 times more would not fit into 32 bits
_SMALLEST = _INT8_MOST * torch.finfo(torch.float32).tiny  # smaller ones have no inverse
_CLIPS = (1.0, 0.92, 0.84)
"""Shares of a group's range that are tried; numbers beyond it are clipped."""
_ELEMENTS_AT_ONCE = 1 << 20  # a few of such float tensors fit into a processor's last cache


@dataclass(frozen=True)
class Int8Weight:
    """A weight [out, in] of int8 with a scale for each output: ``codes * scales``."""

    codes: torch.Tensor
    """[out, in] int8."""
    scales: torch.Tensor
    """[out] float32."""

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> Int8Weight:
        """A weight [out, in] rounded to nearest, an output's largest number becoming 127."""
        return cls(*round_rows(weight))

    @classmethod
    def joined(cls, weights: Sequence[Int8Weight]) -> Int8Weight:
        """One weight whose outputs are those of ``weights``, side by side."""
        return cls(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
        )

    def dequantized(self) -> torch.Tensor:
        """[out, in] float32."""
        return self.codes * self.scales[:, None]


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in] of codes; in each group of columns an output has a scale and a zero:
    ``(codes - zeros) * scales``."""

    codes: torch.Tensor
    """[out, in] uint8, codes of ``bits``; columns in the order of ``order``."""
    scales: torch.Tensor
    """[out, groups] float32; the last group may be shorter."""
    zeros: torch.Tensor
    """[out, groups] uint8."""
    group_size: int
    """Columns of a group, a multiple of 8, up to 65,536; the last may have fewer."""
    order: torch.Tensor | None = None
    """[in] int32: the weight's column that each column of codes is, contiguous; None: its own."""

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
        """One weight whose outputs are those of ``weights``, side by side.

        Raises:
            ValueError: they have groups of other sizes, other tables or orders.
        """
        sizes = {weight.group_size for weight in weights}
        if len(sizes) > 1:
            raise ValueError(f"weights with groups of {sorted(sizes)} columns cannot be joined")
        if len({weight.layout for weight in weights}) > 1:
            raise ValueError("weights of several tables or orders cannot be joined")
        codes, scales, zeros = (
            torch.cat([getattr(weight, name) for weight in weights])
            for name in ("codes", "scales", "zeros")
        )
        return replace(weights[0], codes=codes, scales=scales, zeros=zeros)

    @property
    def layout(self) -> tuple[object, ...]:
        """Weights can be joined if these are equal: group size, and order."""
        return self.group_size, _bytes(self.order)

    def values(self) -> torch.Tensor:
        """[out, in] int16: the numbers of the codes, before zeros and scales."""
        return self.codes.short()

    def dequantized(self) -> torch.Tensor:
        """[out, in] float32."""
        width = self.codes.shape[1]
        spread = [
            t.repeat_interleave(self.group_size, 1)[:, :width] for t in (self.scales, self.zeros)
        ]
        sorted_ = (self.values() - spread[1]) * spread[0]
        if self.order is None:
            return sorted_
        return torch.empty_like(sorted_).index_copy_(1, self.order.long(), sorted_)


@dataclass(frozen=True)
class Int8GroupedWeight(GroupedWeight):
    """Codes of 8 bits in groups, from 0 to 255."""

    bits = 8


@dataclass(frozen=True)
class Int4Weight(GroupedWeight):
    """Codes of 4 bits in groups, from 0 to 15; ``(table[codes] - zeros) * scales`` where they have
    a table."""

    table: torch.Tensor | None = None
    """[16] int8, from -127 to 127: the number of each code; None: the code itself."""

    bits = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is not None and self.table.shape != (16,):
            raise ValueError(f"table is {tuple(self.table.shape)}; it must be (16,)")

    @classmethod
    def rounded(cls, weight: torch.Tensor, group_size: int) -> Int4Weight:
        """A weight [out, in] rounded to nearest, between a group's smallest number and its largest,
        or a little less where that leaves less error."""
        step = max(1, _ELEMENTS_AT_ONCE // max(1, weight.shape[1]))
        parts = [_round_groups(part, group_size) for part in torch.split(weight, step)]
        codes, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return cls(codes, scales, zeros, group_size)

    @property
    def layout(self) -> tuple[object, ...]:
        """Group size, order, and table."""
        return *super().layout, _bytes(self.table)

    def values(self) -> torch.Tensor:
        """[out, in] int16: the numbers of the codes, before zeros and scales."""
        return super().values() if self.table is None else self.table[self.codes.int()].short()


LowBitWeight = Int8Weight | GroupedWeight


def can_group(group_size: int) -> bool:
    """Whether the kernels take groups of ``group_size`` columns."""
    return group_size % _STEP == 0 and group_size <= _MOST


def _bytes(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.numpy().tobytes()


def _is_permutation(order: torch.Tensor, count: int) -> bool:
    if order.dtype != torch.int32 or order.shape != (count,) or not order.is_contiguous():
        return False
    return torch.equal(order.sort().values, torch.arange(count, dtype=torch.int32))


def _round_groups(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, ...]:
    """Codes [out, in], scales and zeros [out, groups] of a weight [out, in]."""
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
        # In float64, so that the order of the sum, which processors differ in, decides nothing.
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
    """Inverse of the scale, and the zero, of groups from ``low`` to ``high``; 0 of empty ones."""
    span = high - low
    inverse = torch.where(span > 0, _INT4_MOST / span, 0)
    return inverse, (-low * inverse).round_()


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [M, width] as int8 [M, width], and their scales [M] float32: max|x| / 127.

    The scale is max|x| times float32's 1 / 127. A row with a number that is not finite has codes of
    0 and a scale of NaN.
    """
    x = x.float()
    most = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    usable = most.isfinite() & (most > _SMALLEST)
    # A number over a tensor is its reciprocal times the number in torch, rounded twice.
    inverse = torch.where(usable, most.new_tensor(_INT8_MOST).div(most), 0)
    codes = torch.where(usable[:, None], x * inverse[:, None], 0).round_().to(torch.int8)
    return codes, torch.where(most.isfinite(), most * (1 / _INT8_MOST), torch.nan)


def low_bit_product(
    x: torch.Tensor,  # [M, in]
    weight: LowBitWeight,  # [out, in]
    bias: torch.Tensor | None = None,  # [out]
    onto: torch.Tensor | None = None,  # [M, out]
) -> torch.Tensor:
    """``x @ weight.T + bias + onto`` of rows as int8, [M, out] of the dtype of x: the reference of
    ``gemm`` over a weight that ``pack_low_bit`` has packed."""
    codes, row_scales = round_rows(x)
    if isinstance(weight, Int8Weight):
        sums = _integer_product(codes, weight.codes)
        out = sums * (row_scales[:, None] * weight.scales)
    else:
        out = _sum_of_groups(codes, weight) * row_scales[:, None]
    for more in (bias, onto):
        if more is not None:
            out = out + more.float()
    return out.to(x.dtype)


def _sum_of_groups(codes: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """[M, out] float32: sums over groups, one after the other."""
    if weight.order is not None:
        codes = codes[:, weight.order]
    total = torch.zeros(len(codes), len(weight.codes))
    values = weight.values()
    for group in range(weight.scales.shape[1]):
        columns = slice(group * weight.group_size, (group + 1) * weight.group_size)
        zeros = weight.zeros[:, group, None].short()
        sums = _integer_product(codes[:, columns], values[:, columns] - zeros)
        total = total + weight.scales[:, group] * sums
    return total


def _integer_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right.T`` of integers, exact in float64, then rounded to float32."""
    return (left.double() @ right.double().T).float()
