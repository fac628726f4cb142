"""Weights of float8 e4m3fn for a CPU's products, with scales for each output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.fp8_blocks import BLOCK, quantize_blocks


@dataclass(frozen=True)
class Float8GroupedWeight:
    """A weight [out, in] of float8; in each group of columns an output has a scale:
    ``codes * scales``.

    Blocks of other shapes are such groups, their scales repeated for each of their outputs.
    """

    codes: torch.Tensor
    """[out, in] float8 e4m3fn, no NaN."""
    scales: torch.Tensor
    """[out, groups] float32; the last group may be shorter."""
    group_size: int
    """Columns of a group, an even number; the last may have fewer."""

    def __post_init__(self) -> None:
        outputs, width = self.codes.shape
        shape = outputs, -(-width // self.group_size)
        if self.codes.dtype != FP8 or tuple(self.scales.shape) != shape:
            raise ValueError(
                f"codes are {list(self.codes.shape)} of {self.codes.dtype} and scales "
                f"{list(self.scales.shape)}; scales of {list(shape)} belong to float8_e4m3fn"
            )
        if self.group_size % 2:
            raise ValueError(f"group_size is {self.group_size}; it must be even")

    @classmethod
    def of_blocks(
        cls, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]
    ) -> Float8GroupedWeight:
        """A weight with a scale for each block.

        Args:
            codes: [out, in] float8 e4m3fn.
            scales: [ceil(out / block[0]), ceil(in / block[1])] float32.
            block: rows and columns that share a scale.
        """
        by_row = scales.repeat_interleave(block[0], 0)[: len(codes)]
        width = codes.shape[1]
        return cls(codes, by_row.contiguous(), min(block[1], width + width % 2))

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> Float8GroupedWeight:
        """A weight [out, in] rounded to nearest, in blocks of 128 x 128 whose largest number
        becomes 448."""
        return cls.of_blocks(*quantize_blocks(weight), (BLOCK, BLOCK))

    @classmethod
    def joined(cls, weights: Sequence[Float8GroupedWeight]) -> Float8GroupedWeight:
        """One weight whose outputs are those of ``weights``, side by side.

        Raises:
            ValueError: their group sizes differ.
        """
        sizes = {weight.group_size for weight in weights}
        if len(sizes) > 1:
            raise ValueError(f"weights with groups of {sorted(sizes)} columns cannot be joined")
        codes, scales = (
            torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scales")
        )
        return cls(codes, scales, sizes.pop())

    def dequantized(self) -> torch.Tensor:
        """[out, in] float32; a product rounds it once more where rows are bfloat16."""
        spread = self.scales.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * spread
