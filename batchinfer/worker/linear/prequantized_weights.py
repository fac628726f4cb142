"""Quantized codes of a checkpoint, kept with linear layers until the layers are packed.

A quantized checkpoint is loaded as floating-point numbers, so that every device and every check can
use the model. If the quantized codes are kept too, layers are packed from these codes, without
rounding again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from batchinfer.kernels.fp8_blocks import BLOCK, check_blocks, dequantize_blocks
from batchinfer.kernels.low_bit import Float8GroupedWeight, GroupedWeight, Int8Weight

_NAME = "saved_codes"


@dataclass(frozen=True)
class Float8Weight:
    """A float8 weight with a scale for each 128 x 128 block."""

    codes: torch.Tensor  # [out, in] float8 e4m3fn
    scales: torch.Tensor  # [ceil(out / 128), ceil(in / 128)] float32

    def __post_init__(self) -> None:
        check_blocks("a float8 weight", self.codes, self.scales)

    @classmethod
    def joined(cls, weights: Sequence[Float8Weight]) -> Float8Weight:
        """Concatenate the outputs of weights, whose numbers of outputs must be multiples of the
        block size."""
        if any(len(weight.codes) % BLOCK for weight in weights):
            raise ValueError(f"only weights with a multiple of {BLOCK} outputs can be joined")
        codes, scales = (
            torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scales")
        )
        return cls(codes, scales)

    def dequantized(self) -> torch.Tensor:
        return dequantize_blocks(self.codes, self.scales)


HostCodes = Int8Weight | GroupedWeight | Float8GroupedWeight
"""Codes that the CPU kernels multiply by."""
Codes = HostCodes | Float8Weight
ReadCodes = Callable[[], Codes | None]
"""Reads a layer's codes when the layer is packed, so that the codes take no memory earlier. Copies
of the layer share this function."""


def keep_codes(linear: nn.Linear, read: ReadCodes) -> None:
    """Keep the codes that a layer's weight was dequantized from."""
    setattr(linear, _NAME, read)


def has_codes(linear: nn.Linear) -> bool:
    """Return True if ``keep_codes`` kept codes for a layer."""
    return hasattr(linear, _NAME)


def codes_of(linear: nn.Linear) -> Codes | None:
    """Read the codes that ``keep_codes`` kept for a layer, if any."""
    read: ReadCodes | None = getattr(linear, _NAME, None)
    return None if read is None else read()


def join_codes(joined: nn.Linear, linears: Sequence[nn.Linear]) -> None:
    """Keep the codes of ``linears`` for ``joined``, which concatenates their outputs."""
    readers: list[ReadCodes | None] = [getattr(linear, _NAME, None) for linear in linears]
    if None not in readers:
        keep_codes(joined, lambda: joined_codes([read and read() for read in readers]))


def joined_codes(codes: Sequence[Codes | None]) -> Any:
    """Concatenate the codes of several weights along their outputs. Return None if some codes are
    missing, or if codes differ in type, groups or order."""
    kind: Any = type(codes[0])
    if codes[0] is None or any(type(part) is not kind for part in codes):
        return None
    try:
        return codes[0] if len(codes) == 1 else kind.joined(codes)
    except ValueError:
        return None
