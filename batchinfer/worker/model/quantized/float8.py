"""Weights of float8 with scales: ``fp8`` (Qwen, DeepSeek, Mistral; AutoFP8), ModelOpt, FBGEMM.

A weight is codes * scales, a scale for all of it, for each row or for each block, as in
transformers' ``integrations/finegrained_fp8.py``. Scales of rows (activations) are left out: rows
keep the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from batchinfer.worker.model.quantized.low_bit import BlockWeight
from batchinfer.worker.model.quantized.stored import (
    Quantized,
    Stored,
    Tensors,
    check_part,
    part_of,
)

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Float8:
    """Weights of float8, each with a tensor of scales.

    Args:
        name: the format's.
        scale_ends: what follows a weight's name in that of its scales, by what wrote it.
        block: rows and columns that share a scale; None: a scale for each row or for all of them,
            as the shape of the scales says.
    """

    name: str
    scale_ends: tuple[str, ...]
    block: tuple[int, int] | None = None

    @property
    def ends(self) -> Mapping[str, str]:
        return dict.fromkeys(self.scale_ends, "")

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        end = next((end for end in self.scale_ends if end in parts), None)
        if end is None and parts[""].dtype not in FLOAT8:
            return None
        codes, scales = part_of(name, parts, ""), part_of(name, parts, end or self.scale_ends[0])
        return float8_weight(codes, scales, self.block)


def float8_weight(codes: Stored, scales: Stored, block: tuple[int, int] | None) -> Quantized:
    """A weight of float8 and its scales, checked.

    Args:
        codes: [..., out, in], of experts with their dimension first.
        scales: [..., ceil(out / block[0]), ceil(in / block[1])].
        block: as in ``Float8``.

    Raises:
        ModelError: their shapes or dtypes do not go together.
    """
    *experts, height, width = (1, 1, *codes.shape)[-max(len(codes.shape), 2) :]
    check_part(codes, (*experts, height, width), *FLOAT8)
    if block is None:
        per_row = scales.shape in ((*experts, height, 1), (*experts, height))
        block = (1 if per_row else height, width)
        shape = scales.shape if per_row or scales.shape in ((), (1,)) else (*experts, 1, 1)
    else:
        shape = (*experts, -(-height // block[0]), -(-width // block[1]))
    check_part(scales, shape, *_SCALES)
    by_block = partial(_by_block, block=block)
    parts = {"": codes, "scales": scales}
    return Quantized.of_low_bit(codes.shape, parts, by_block)


def _by_block(tensors: Tensors, block: tuple[int, int]) -> BlockWeight:
    codes, scales = tensors[""], tensors["scales"].float()
    return BlockWeight(codes, scales.reshape(-(-len(codes) // block[0]), -1), block)
