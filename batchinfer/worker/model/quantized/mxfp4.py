"""Reads gpt-oss's experts in MXFP4: pairs of 4-bit floats, with a scale for every 32 numbers.

Source: the OCP Microscaling Formats specification, and transformers' ``integrations/mxfp4.py`` for
the layout. A scale is a power of two, saved as its exponent plus 127. Experts are saved as
[experts, out, in] and used as [experts, in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from batchinfer.worker.model.quantized.float4 import (
    FLOAT4,
    float4_codes,
    float4_values,
    powers_of_two,
)
from batchinfer.worker.model.quantized.low_bit import TableWeight
from batchinfer.worker.model.quantized.stored_tensors import (
    Quantized,
    Stored,
    Tensors,
    check_part,
    part_of,
)

_BLOCK_BYTES = 16


class Mxfp4:
    name = "mxfp4"
    ends: Mapping[str, str] = {"_blocks": "", "_scales": ""}

    def weight(self, name: str, parts: Mapping[str, Stored]) -> Quantized | None:
        if "" in parts:
            return None
        blocks, scales = (part_of(name, parts, end) for end in self.ends)
        experts, outputs, num_blocks = (*scales.shape, 0, 0, 0)[:3]
        check_part(scales, (experts, outputs, num_blocks), "U8")
        check_part(blocks, (*scales.shape, _BLOCK_BYTES), "U8")
        shape = (experts, num_blocks * 2 * _BLOCK_BYTES, outputs)
        dequantize, codes = partial(_dequantize, scales.name), partial(_codes, scales.name)
        return Quantized(shape, parts, dequantize, by_expert=True, low_bit=codes)


def _dequantize(scales_name: str, tensors: Tensors) -> torch.Tensor:
    """Convert one expert's bytes [out, blocks, 16] to float32 [in, out]."""
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    values = float4_values(blocks)
    return values.mul_(powers_of_two(scales_name, scales).unsqueeze(-1)).flatten(1).T


def _codes(scales_name: str, tensors: Tensors) -> TableWeight:
    """Convert one expert's bytes to codes [out, in]."""
    codes = float4_codes(tensors["_blocks"]).flatten(1)
    return TableWeight(codes, FLOAT4, powers_of_two(scales_name, tensors["_scales"]))
