"""Linear layers over weights of few bits, on a CPU.

Rows are rounded to int8 beside int8 and int4; beside float8 they are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from batchinfer.errors import DeviceError, ModelError
from batchinfer.kernels.float8_rows import Float8Rows
from batchinfer.kernels.low_bit import Int4Weight, Int8GroupedWeight, Int8Weight
from batchinfer.worker.linear.codes import HostCodes, codes_of
from batchinfer.worker.linear.experts import pack_experts
from batchinfer.worker.linear.packed_linear import PackedLinear, pack_linears, packs
from batchinfer.worker.linear_kernels import FLOAT8_METHOD, LinearKernel, codes_kernel
from batchinfer.worker.linear_kernels import pack_codes as pack_weight

_KINDS: Mapping[type, str] = {
    Int8Weight: "int8",
    Int8GroupedWeight: "int8",
    Int4Weight: "int4",
    Float8Rows: FLOAT8_METHOD,
}
"""Values of ``model.quantization`` by what their kernels multiply by."""
_OF_HEAD = "int8"
"""A head's outputs are compared with each other: four bits would change which is the largest."""


def quantize_packed(model: Any, method: str, dtype: torch.dtype) -> LinearKernel:
    """Round the weights of a model's linear layers and of its experts, and pack them; the output
    head's to int8, or with float8 not at all.

    ``model.quantization: int8``, ``int4`` or ``fp8``; call it when the layers are fused. A weight
    of int8 has a scale for each output, one of int4 a scale and a zero for each 64 columns of it; a
    row has a scale that is taken when it is multiplied: its largest number becomes 127. (torchao's
    ``Int8DynamicActivationInt8WeightConfig`` has it become 127.5 before it is rounded, so that
    results differ by as much as either rounds.) Float8 has a scale for each block of 128 x 128.

    Args:
        model: one of transformers' for text.
        method: a key of ``linear_kernels.ON_CPU``.
        dtype: of its weights.

    Returns:
        What multiplies by those of the layers.

    Raises:
        DeviceError: there is no kernel for ``dtype`` here.
        ModelError: the model has no such layers.
    """
    kernel, head = _kernel(method, dtype, method), model.get_output_embeddings()
    as_saved = any(isinstance(module, PackedLinear) for module in model.modules())
    if not pack_linears(model, kernel, dtype, but=head) and not as_saved:
        raise ModelError(
            f"model.quantization: models of the family {model.config.model_type!r} have no linear "
            "layers that can be quantized"
        )
    if method != FLOAT8_METHOD:
        pack_linears(model, _kernel(_OF_HEAD, dtype, method), dtype)
    pack_experts(model, kernel, dtype, as_saved=True)
    return kernel


def pack_codes(model: nn.Module, dtype: torch.dtype) -> dict[str, LinearKernel]:
    """Pack those linear layers of a model whose codes were kept (``codes.keep_codes``).

    Call it when the layers are fused, and before ``pack_linears`` packs the others. Where there is
    no kernel for ``dtype`` they stay plain numbers.

    Args:
        dtype: of the model's weights.

    Returns:
        What multiplies by them, by ``int8``, ``int4`` and ``fp8``.
    """
    used: dict[str, LinearKernel] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = codes_of(child) if isinstance(child, nn.Linear) else None
            if not isinstance(weight, HostCodes):
                continue
            kind = _KINDS[type(weight)]
            kernel = codes_kernel(kind, dtype)
            if kernel is not None and packs(child, kernel, dtype):
                setattr(parent, name, PackedLinear(child, kernel, pack_weight(weight, dtype)))
                used[kind] = kernel
    return used


def _kernel(name: str, dtype: torch.dtype, method: str) -> LinearKernel:
    kernel = codes_kernel(name, dtype)
    if kernel is None:
        raise DeviceError(
            f"model.quantization: {method} needs a C compiler (cc, or $CC), and model.dtype: "
            "float32 or bfloat16",
            hint="install one, choose another model.dtype, or take int8_weight_only",
        )
    return kernel
