"""4-bit weights as the CUDA kernel reads them: words of eight codes, scales and zero points.

A weight [N, K] is divided into blocks of 128 columns, padded with zeros. In a block, word w (0 to
15) of an output has the codes of columns w, w + 16, ..., w + 112: the first four in its lower half,
the others in its upper half. So one instruction moves the halves of two words into one register,
and a few more make a pair of neighboring columns in 16 bits of them.

An integer code takes four bits in a row. The bits of an e2m1 code are where the fewest instructions
move them to their places in a bfloat16 or float16: `E2M1_MOVES` lists these instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer.kernels.low_bit import Int4Weight

WORD_BLOCK = 128
"""Number of columns in a block."""
WORDS = 16
"""Number of words per block and output."""
CODES = 8
"""Number of codes in a word."""
_HALF, _PER_HALF = 16, 4
_GROUPS = (16, 32, 64, 128)
_E2M1_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number of each e2m1 code."""
_E2M1_STEP = 0.5
_PRODUCTS = (0.5, 1.5, 6.0)  # e2m1 numbers; if they times a scale are exact, all are
Moves = tuple[tuple[int, int], ...]
"""Pairs of (bits to shift to the left, mask). The result is the sum of the masked numbers."""
INTEGER_MOVES: tuple[Moves, ...] = tuple(((-4 * at, 0xF),) for at in range(_PER_HALF))
"""For each of the four codes in half a word, the moves that bring it to the lowest bits."""
E2M1_MOVES: dict[torch.dtype, tuple[Moves, ...]] = {
    torch.bfloat16: (
        ((0, 0x81C0),),
        ((3, 0x81C0),),
        ((6, 0x81C0),),
        ((1, 0x8000), (-5, 0x0100), (-4, 0x00C0)),
    ),
    torch.float16: (
        ((0, 0x8E00),),
        ((3, 0x8E00),),
        ((1, 0x8000), (6, 0x0E00)),
        ((2, 0x8000), (9, 0x0E00)),
    ),
}
"""For each of the four codes in half a word, the moves that make it a number of the dtype, divided
by the power of two in ``E2M1_UNITS``."""
E2M1_UNITS = {torch.bfloat16: 2.0**126, torch.float16: 2.0**14}


@dataclass(frozen=True)
class Int4Words:
    """A 4-bit weight [N, K], ``(codes - zeros) * scales`` or ``codes * scales * factors``."""

    words: torch.Tensor
    """[ceil(K / 128), N, 16] int32."""
    scales: torch.Tensor
    """[groups, N] float32; or 16 bits, if each product of a code and its scale is exact in 16
    bits."""
    zeros: torch.Tensor | None
    """[groups, N] uint8: codes are integers from 0 to 15; None: codes are e2m1 numbers."""
    factors: torch.Tensor | None
    """[N] float32; None: all 1."""
    order: torch.Tensor | None
    """[K] int32: for each column of the codes, its column in the weight; None: the same column."""
    width: int
    """K."""
    dtype: torch.dtype
    """Dtype of the rows that the words are made for; it matters for e2m1 codes only."""

    @classmethod
    def packed(cls, weight: Int4Weight, dtype: torch.dtype) -> Int4Words:
        """Pack a weight that ``can_pack``, on its device, for rows of `dtype`.

        Raises:
            ValueError: the kernel does not support the weight.
        """
        if not can_pack(weight):
            raise ValueError(
                "the CUDA kernel supports 4-bit integers and e2m1 numbers, in groups of 16, 32 or "
                "64 columns or of multiples of 128"
            )
        outputs, width = weight.codes.shape
        blocks = -(-width // WORD_BLOCK)
        is_e2m1 = weight.table is not None
        codes = weight.codes.new_zeros(outputs, blocks * WORD_BLOCK)
        codes[:, :width] = weight.codes
        scales, factors = weight.scales.float(), weight.factors
        if factors is not None:
            factors = factors / _E2M1_STEP
        elif is_e2m1:
            scales = scales / _E2M1_STEP
        if is_e2m1 and _is_exact(scales, dtype):
            scales = scales.to(dtype)
        return cls(
            words=_pack(codes.view(outputs, blocks, CODES, WORDS), _moves(dtype, is_e2m1)),
            scales=_by_group(scales, weight.group_size, blocks),
            zeros=None if is_e2m1 else _by_group(weight.zeros, weight.group_size, blocks),
            factors=factors,
            order=weight.order,
            width=width,
            dtype=dtype,
        )

    @property
    def group_size(self) -> int:
        """Columns per group: 16, 32, 64 or 128."""
        return len(self.words) * WORD_BLOCK // len(self.scales)

    @property
    def outputs(self) -> int:
        """N."""
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = self.words, self.scales, self.zeros, self.factors, self.order
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight [N, K], computed in `dtype`."""
        values = self._values().to(dtype)  # [N, blocks * 128]
        if self.zeros is not None:
            values = values - self._spread(self.zeros.to(dtype))
        values = values * self._spread(self.scales.to(dtype))
        if self.factors is not None:
            values = values * self.factors.to(dtype)[:, None]
        values = values[:, : self.width]
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order.long(), values)

    def _values(self) -> torch.Tensor:
        """Return the numbers of the codes [N, blocks * 128], with integers as they are."""
        halves = [(self.words >> shift) & 0xFFFF for shift in (0, _HALF)]
        moves = _moves(self.dtype, self.zeros is None)
        parts = torch.stack([_moved(half, each) for half in halves for each in moves], 2)
        parts = parts.permute(1, 0, 2, 3).flatten(1)  # from [blocks, N, 8, 16]
        if self.zeros is not None:
            return parts
        dtype = _e2m1_dtype(self.dtype)
        return parts.to(torch.int16).view(dtype).double() * E2M1_UNITS[dtype]

    def _spread(self, by_group: torch.Tensor) -> torch.Tensor:
        return by_group.T.repeat_interleave(self.group_size, 1)


def can_pack(weight: Int4Weight) -> bool:
    """Return true if the CUDA kernel supports the weight's table and group size."""
    size, width = weight.group_size, weight.codes.shape[1]
    fits = size in _GROUPS or size % WORD_BLOCK == 0 or size >= width
    return fits and (weight.table is None or tuple(weight.table.tolist()) == _E2M1_TABLE)


def _moves(dtype: torch.dtype, is_e2m1: bool) -> tuple[Moves, ...]:
    return E2M1_MOVES[_e2m1_dtype(dtype)] if is_e2m1 else INTEGER_MOVES


def _e2m1_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that e2m1 codes are first converted to, for rows of `dtype`."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _pack(
    codes: torch.Tensor,  # [N, blocks, 8, 16] uint8
    moves: tuple[Moves, ...],
) -> torch.Tensor:  # [blocks, N, 16] int32
    words = codes.new_zeros(codes.shape[0], codes.shape[1], WORDS, dtype=torch.int32)
    for at in range(CODES):
        code = codes[:, :, at].int()
        for bit, source in enumerate(_source_bits(moves[at % _PER_HALF])):
            words |= ((code >> bit) & 1) << (source + at // _PER_HALF * _HALF)
    return words.transpose(0, 1).contiguous()


def _source_bits(moves: Moves) -> list[int]:
    """Return the places in half a word from which moves take a code's bits, lowest bit first."""
    moved = sorted(
        (bit, bit - shift) for shift, mask in moves for bit in range(_HALF) if mask >> bit & 1
    )
    return [source for _, source in moved]


def _moved(half: torch.Tensor, moves: Moves) -> torch.Tensor:
    total = torch.zeros_like(half)
    for shift, mask in moves:
        total |= (half << shift if shift >= 0 else half >> -shift) & mask
    return total


def _by_group(
    numbers: torch.Tensor,  # [N, groups]
    group_size: int,
    blocks: int,
) -> torch.Tensor:  # [padded groups, N]
    """Transpose numbers, repeat those of groups with over 128 columns, and pad them with zeros."""
    if group_size not in _GROUPS:
        numbers = numbers.repeat_interleave(-(-group_size // WORD_BLOCK), 1)
    per_block = WORD_BLOCK // min(group_size, WORD_BLOCK) if group_size in _GROUPS else 1
    groups = blocks * per_block
    padded = numbers.new_zeros(groups, len(numbers))
    padded[: numbers.shape[1]] = numbers[:, :groups].T
    return padded


def _is_exact(scales: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return true if the product of every e2m1 number and every scale, float32, is exact in
    `dtype`. It is for the scales of MXFP4 and NVFP4, which have few significant bits, unless they
    are extremely large or small."""
    products = [scales * number for number in _PRODUCTS]
    return all(torch.equal(each, each.to(dtype).float()) for each in products)
