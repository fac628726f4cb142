"""Low-bit weights as checkpoints save them: integers, indices into a table, or float8 blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer.errors import ModelError

WORD_BITS = 32


def words_for(count: int, bits: int) -> int:
    """Return how many 32-bit words ``count`` packed numbers of ``bits`` bits take."""
    return -(-count * bits // WORD_BITS)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words [..., n] into uint8 numbers [..., n * 32 / bits] of 2, 4 or 8 ``bits``.
    The first number of a word is in the lowest bits."""
    # The bytes of each word, lowest first, on a little-endian host.
    data = words.flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return data
    mask = (1 << bits) - 1
    numbers = [(data >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(numbers, dim=-1).flatten(-2)


def check_groups(name: str, group_of: torch.Tensor, groups: int) -> None:
    """Raise ModelError unless all group numbers ``group_of`` [in] of a weight are in [0,
    ``groups``)."""
    first, last = int(group_of.min()), int(group_of.max())
    if not 0 <= first <= last < groups:
        raise ModelError(
            f"{name}: g_idx assigns inputs to groups {first} to {last}, but the weight has "
            f"{groups} groups; fetch the model again"
        )


@dataclass(frozen=True)
class IntegerWeight:
    """A weight that equals (numbers - zeros) * scales."""

    bits: int
    numbers: torch.Tensor  # [out, in] int8 or uint8
    scales: torch.Tensor  # [out or 1, groups]
    zeros: torch.Tensor | None = None  # same shape as scales, same range as numbers; None: all 0
    group_of: torch.Tensor | None = None  # [in]; None: groups are ranges of equal size

    def __post_init__(self) -> None:
        inputs, groups = self.numbers.shape[1], self.scales.shape[1]
        if self.group_of is None and inputs % groups:
            raise ValueError(f"{inputs} inputs cannot be divided into {groups} equal groups")

    def dequantize(self) -> torch.Tensor:
        """Return the weight [out, in] in float32. The result is exact if scales have at most 16
        bits."""
        values = self.numbers.contiguous().float()
        if self.zeros is not None:
            values -= self._spread(self.zeros.float())
        return values.mul_(self._spread(self.scales.float()))

    def _spread(self, by_group: torch.Tensor) -> torch.Tensor:
        if self.group_of is not None:
            return by_group[:, self.group_of]
        width = self.numbers.shape[1]
        return spread(by_group, (len(by_group), width), (1, -(-width // by_group.shape[1])))


@dataclass(frozen=True)
class BlockWeight:
    """A float8 weight that equals codes * scales."""

    codes: torch.Tensor  # [out, in] float8
    scales: torch.Tensor  # [ceil(out / block[0]), ceil(in / block[1])] float32
    block: tuple[int, int]  # rows and columns that share a scale

    def dequantize(self) -> torch.Tensor:
        """Return the weight [out, in] in float32."""
        height, width = self.codes.shape
        # On a CPU, looking float8 codes up in a table is four times as fast as torch's conversion.
        every = torch.arange(256, dtype=torch.uint8).view(self.codes.dtype).float()
        values = every.index_select(0, self.codes.view(torch.uint8).flatten().int())
        values = values.view(height, width)
        return values.mul_(spread(self.scales, (height, width), self.block))


@dataclass(frozen=True)
class TableWeight:
    """A 4-bit weight that equals table[codes] * scales * factors."""

    codes: torch.Tensor  # [out, in] uint8, from 0 to 15
    table: torch.Tensor  # [16] float32
    scales: torch.Tensor  # [out, groups]; each group is a range of equal size
    factors: torch.Tensor | None = None  # [out] float32; None: all 1

    def __post_init__(self) -> None:
        wanted = torch.float32 if self.factors is None else torch.float8_e4m3fn
        if self.scales.dtype != wanted:
            raise ValueError(f"scales are {self.scales.dtype}; they must be {wanted}")


LowBitCodes = IntegerWeight | TableWeight | BlockWeight


def spread(scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """Repeat the scale of each block for its elements, unless the dimension broadcasts.

    Args:
        scales: [ceil(out / block[0]), ceil(in / block[1])].
        shape: (out, in).
        block: numbers of rows and columns of a block; the last blocks may be smaller.
    """
    for axis, (size, length) in enumerate(zip(block, shape, strict=True)):
        if scales.shape[axis] not in (1, length):
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, length)
    return scales
