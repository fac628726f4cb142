"""Reads float8 weights: ``fp8`` (Qwen, DeepSeek, Mistral; AutoFP8), FBGEMM, and parts of ModelOpt.

A weight equals its codes times its scales. As in transformers' ``integrations/finegrained_fp8.py``,
there is one scale for the whole weight, for each output or for each block. Scales of activations
are ignored, because activations keep the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchinfer.worker.model.quantized.low_bit import BlockWeight
from batchinfer.worker.model.quantized.stored_tensors import (
    Quantized,
    Stored,
    Tensors,
    check_part,
    experts_and_matrix,
    part_of,
)

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True)
class Float8:
    """A format in which each float8 weight has a tensor of scales."""

    name: str
    scale_ends: tuple[str, ...]
    """Suffixes for the names of scale tensors, which differ between tools."""
    block: tuple[int, int] | None = None
    """Numbers of rows and columns of a block that shares a scale. If None, there is one scale for
    each row or for the whole weight, depending on the scales' shape."""

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
    """Make a weight from ``codes``, [out, in] or [experts, out, in], and their scales.

    Raises:
        ModelError: shapes or dtypes do not match.
    """
    *experts, height, width = experts_and_matrix(codes.shape)
    check_part(codes, (*experts, height, width), *FLOAT8)
    if block is None:
        per_row = scales.shape in ((*experts, height, 1), (*experts, height))
        block = (1 if per_row else height, width)
        shape = scales.shape if per_row or scales.shape in ((), (1,)) else (*experts, 1, 1)
    else:
        shape = (*experts, -(-height // block[0]), -(-width // block[1]))
    check_part(scales, shape, *_SCALES)

    def by_block(tensors: Tensors) -> BlockWeight:
        codes, scales = tensors[""], tensors["scales"].float()
        return BlockWeight(codes, scales.reshape(-(-len(codes) // block[0]), -1), block)

    return Quantized.of_low_bit(codes.shape, {"": codes, "scales": scales}, by_block)
