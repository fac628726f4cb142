"""4-bit floats with a 2-bit exponent and a 1-bit mantissa (e2m1), and their formats MXFP4 and
NVFP4.

A byte holds two numbers, the first in its lower half. In MXFP4, 32 numbers of a row share a scale.
It is a power of two, saved as its exponent plus 127. The module ``mxfp4`` reads gpt-oss's layout of
MXFP4; this module reads the layout of compressed-tensors.

In NVFP4, 16 numbers of a row share a float8 scale (e4m3), and the whole weight has a float32 scale.
compressed-tensors saves the reciprocal of the float32 scale (``weight_global_scale``), ModelOpt the
scale itself (``weight_scale_2``).

Sources: the OCP Microscaling Formats specification, compressed-tensors' ``compressors/mxfp4``,
``compressors/nvfp4`` and ``quantization/lifecycle``, and Model Optimizer's
``quantization/qtensor/nvfp4_tensor.py``.
"""

from __future__ import annotations

from functools import partial

import torch

from batchinfer.errors import ModelError
from batchinfer.worker.model.quantized.low_bit import TableWeight, spread
from batchinfer.worker.model.quantized.stored_tensors import (
    Quantized,
    Stored,
    Tensors,
    check_part,
)

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT4 = torch.tensor([*_HALF, *(-value for value in _HALF)])
"""The number that each 4-bit code stands for, [16] float32."""
_PAIRS = torch.stack([FLOAT4.repeat(16), FLOAT4.repeat_interleave(16)], dim=1)
"""The two numbers of each byte, [256, 2]."""
MXFP4_GROUP, NVFP4_GROUP = 32, 16
_NAN = 255
"""The only code of a scale of MXFP4 that is not a number."""


def float4_values(data: torch.Tensor) -> torch.Tensor:
    """Convert bytes [..., n] uint8 to their numbers [..., 2 * n] float32."""
    return _PAIRS.index_select(0, data.flatten().int()).view(*data.shape[:-1], -1)


def float4_codes(data: torch.Tensor) -> torch.Tensor:
    """Convert bytes [..., n] uint8 to their codes [..., 2 * n] uint8, from 0 to 15."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def powers_of_two(name: str, exponents: torch.Tensor) -> torch.Tensor:
    """Convert the scales of MXFP4 to float32.

    Args:
        name: the name of the tensor, for error messages.
        exponents: exponents plus 127, uint8.

    Raises:
        ModelError: a scale is NaN.
    """
    if bool((exponents == _NAN).any()):
        raise ModelError(
            f"{name} contains the code {_NAN}, which means NaN in MXFP4; fetch the model again"
        )
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()


def mxfp4_weight(data: Stored, scales: Stored) -> Quantized:
    """Make a weight [out, in] in MXFP4.

    Args:
        data: [out, in / 2] bytes of two numbers each.
        scales: [out, in / 32] uint8, exponents plus 127.

    Raises:
        ModelError: shapes or dtypes do not match, or the tensors hold a layer's experts together.
    """
    shape = _check_pairs(data, scales, MXFP4_GROUP, "U8")
    parts = {"": data, "scales": scales}
    dequantize = partial(_dequantize_mxfp4, scales.name)
    return Quantized(shape, parts, dequantize, low_bit=partial(_mxfp4_codes, scales.name))


def _check_pairs(data: Stored, scales: Stored, group: int, dtype: str) -> tuple[int, int]:
    """Check a weight's bytes and scales, and return the weight's shape (out, in)."""
    if len(data.shape) == 3:
        raise joined_experts(data.name)
    outputs, num_bytes = data.shape if len(data.shape) == 2 else (0, 0)
    num_bytes += -num_bytes % (group // 2)
    check_part(data, (outputs, num_bytes), "U8")
    check_part(scales, (outputs, 2 * num_bytes // group), dtype)
    return outputs, 2 * num_bytes


def _dequantize_mxfp4(scales_name: str, tensors: Tensors) -> torch.Tensor:
    values = float4_values(tensors[""])
    outputs, inputs = values.shape
    scales = powers_of_two(scales_name, tensors["scales"])
    return values.mul_(spread(scales, (outputs, inputs), (1, MXFP4_GROUP)))


def _mxfp4_codes(scales_name: str, tensors: Tensors) -> TableWeight:
    return TableWeight(
        float4_codes(tensors[""]), FLOAT4, powers_of_two(scales_name, tensors["scales"])
    )


def nvfp4_weight(
    name: str, data: Stored, scales: Stored, global_scale: Stored, *, is_reciprocal: bool
) -> Quantized:
    """Make a weight [out, in] in NVFP4.

    Args:
        data: [out, in / 2] bytes of two numbers each.
        scales: [out, in / 16] float8 e4m3.
        global_scale: one number, float32.
        is_reciprocal: True if weights are divided by ``global_scale``, False if they are multiplied
            by it.

    Raises:
        ModelError: shapes or dtypes do not match, or one tensor holds all experts of a layer.
    """
    shape = _check_pairs(data, scales, NVFP4_GROUP, "F8_E4M3")
    check_part(global_scale, () if global_scale.shape == () else (1,), "F32")
    parts = {"": data, "scales": scales, "global": global_scale}
    low_bit = partial(_codes, name, is_reciprocal)
    return Quantized(shape, parts, partial(_dequantize, name, is_reciprocal), low_bit=low_bit)


def joined_experts(name: str) -> ModelError:
    return ModelError(
        f"{name} holds all experts of a layer in one tensor, which is not yet supported in this "
        "format; use a checkpoint with separate tensors for each expert"
    )


def _dequantize(name: str, is_reciprocal: bool, tensors: Tensors) -> torch.Tensor:
    values = float4_values(tensors[""])
    factor = _factor(name, tensors)
    scales = tensors["scales"].float()
    scales = scales / factor if is_reciprocal else scales * factor
    outputs, inputs = values.shape
    return values.mul_(spread(scales, (outputs, inputs), (1, NVFP4_GROUP)))


def _codes(name: str, is_reciprocal: bool, tensors: Tensors) -> TableWeight:
    factor = _factor(name, tensors)
    factors = (factor.reciprocal() if is_reciprocal else factor).expand(len(tensors[""]))
    return TableWeight(float4_codes(tensors[""]), FLOAT4, tensors["scales"], factors)


def _factor(name: str, tensors: Tensors) -> torch.Tensor:
    factor = tensors["global"].view(1)
    if not factor > 0:
        raise ModelError(
            f"{name}: the scale of the whole weight is {factor.item()}, but it must be positive; "
            "fetch the model again"
        )
    return factor
