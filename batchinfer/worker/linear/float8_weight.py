"""A weight of float8 e4m3fn as it was saved, with a scale for each block of 128 x 128."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchinfer.kernels.fp8_blocks import BLOCK, check_blocks, dequantize_blocks


@dataclass(frozen=True)
class Float8Weight:
    """A weight [out, in]: ``codes * scales``, a scale for each block."""

    codes: torch.Tensor
    """[out, in] float8 e4m3fn."""
    scales: torch.Tensor
    """[ceil(out / 128), ceil(in / 128)] float32."""

    def __post_init__(self) -> None:
        check_blocks("a saved weight", self.codes, self.scales)

    @property
    def can_be_joined(self) -> bool:
        """Whether its outputs are whole blocks, so that others' blocks can follow."""
        return len(self.codes) % BLOCK == 0

    @classmethod
    def joined(cls, weights: Sequence[Float8Weight]) -> Float8Weight:
        """One weight whose outputs are those of ``weights``, side by side: whole blocks."""
        return cls(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
        )

    def dequantized(self) -> torch.Tensor:
        """[out, in] float32."""
        return dequantize_blocks(self.codes, self.scales)
