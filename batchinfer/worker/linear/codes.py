"""The codes that a linear layer's plain weight was dequantized from, kept until it is packed.

A quantized checkpoint is loaded as plain numbers, so that any device runs it and every check sees
numbers. If its codes are kept with them, layers are packed as they were saved, not rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from batchinfer.kernels.float8_rows import Float8Rows
from batchinfer.kernels.fp8_blocks import BLOCK, check_blocks, dequantize_blocks
from batchinfer.kernels.low_bit import GroupedWeight, Int8Weight

_NAME = "saved_codes"


@dataclass(frozen=True)
class Float8Weight:
    """A weight [out, in] of float8 e4m3fn as it was saved, with a scale for each 128 x 128 block.

    Args:
        codes: [out, in] float8 e4m3fn.
        scales: [ceil(out / 128), ceil(in / 128)] float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        check_blocks("a saved weight", self.codes, self.scales)

    @classmethod
    def joined(cls, weights: Sequence[Float8Weight]) -> Float8Weight:
        """One weight whose outputs, whole blocks, are those of ``weights``, side by side."""
        return cls(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
        )

    def dequantized(self) -> torch.Tensor:
        """[out, in] float32."""
        return dequantize_blocks(self.codes, self.scales)


HostCodes = Int8Weight | GroupedWeight | Float8Rows
"""Codes that a CPU's kernels multiply by."""
Codes = HostCodes | Float8Weight


@dataclass(frozen=True)
class KeptCodes:
    """Codes that are read only when the layer is packed, and take no memory before."""

    joins: tuple[Any, ...] | None
    """Type and layout: layers are joined if theirs are equal. None: it cannot be joined."""
    read: Callable[[], Codes]

    @classmethod
    def of(cls, weight: Codes, read: Callable[[], Codes] | None = None) -> KeptCodes:
        """Codes in memory, or those that ``read`` reads, which are like ``weight``."""
        joins: tuple[Any, ...] | None = (type(weight),)
        if isinstance(weight, GroupedWeight):
            joins = type(weight), weight.layout
        elif isinstance(weight, Float8Rows):
            joins = type(weight), weight.group_size
        elif isinstance(weight, Float8Weight) and len(weight.codes) % BLOCK:
            joins = None  # other blocks could not follow
        return cls(joins, read or (lambda: weight))

    def __deepcopy__(self, memo: object) -> KeptCodes:
        return self  # immutable


def keep_codes(linear: nn.Linear, codes: Codes | KeptCodes) -> None:
    """Keep the codes that a layer's weight was dequantized from."""
    kept = codes if isinstance(codes, KeptCodes) else KeptCodes.of(codes)
    setattr(linear, _NAME, kept)


def codes_of(linear: nn.Linear) -> Codes | None:
    """Read the codes that ``keep_codes`` has kept; None: there are none."""
    kept: KeptCodes | None = getattr(linear, _NAME, None)
    return None if kept is None else kept.read()


def join_codes(joined: nn.Linear, linears: Sequence[nn.Linear]) -> None:
    """Keep the codes of ``linears`` for a layer whose outputs are theirs, side by side.

    None are kept if some have none, or other codes than the first.
    """
    parts: list[Any] = [getattr(linear, _NAME, None) for linear in linears]
    joins = {part and part.joins for part in parts}
    (common,) = joins if len(joins) == 1 else (None,)
    if common is not None:
        keep_codes(joined, KeptCodes(common, partial(_joined, common[0], parts)))


def _joined(kind: Any, parts: Sequence[KeptCodes]) -> Codes:
    weight: Codes = kind.joined([kept.read() for kept in parts])
    return weight
