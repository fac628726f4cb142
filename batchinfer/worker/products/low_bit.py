"""Linear layers over weights of 8 and 4 bits, on a CPU: rows are rounded to int8 as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.errors import DeviceError, ModelError
from batchinfer.kernels.low_bit import Int8Weight, LowBitWeight
from batchinfer.worker.product_kernels import ProductKernel, low_bit_kernel, pack_own
from batchinfer.worker.products.codes import codes_of
from batchinfer.worker.products.experts import pack_experts
from batchinfer.worker.products.linear import PackedLinear, pack_linears, packs

_OF_HEAD = "int8"
"""A head's outputs are compared with each other: four bits would change which is the largest."""


def quantize_packed(model: Any, method: str, dtype: torch.dtype) -> ProductKernel:
    """Round the weights of a model's linear layers and of its experts, and pack them; the output
    head's to int8.

    ``model.quantization: int8`` or ``int4``; call it when the layers are fused. A weight of int8
    has a scale for each output, one of int4 a scale and a zero for each 64 columns of it; a row has
    a scale that is taken when it is multiplied: its largest number becomes 127. (torchao's
    ``Int8DynamicActivationInt8WeightConfig`` has it become 127.5 before it is rounded, so that
    results differ by as much as either rounds.)

    Args:
        model: one of transformers' for text.
        method: a key of ``product_kernels.LOW_BIT_METHODS``.
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
            "layers that can be quantised"
        )
    pack_linears(model, _kernel(_OF_HEAD, dtype, method), dtype)
    pack_experts(model, kernel, dtype, as_saved=True)
    return kernel


def pack_codes(model: nn.Module, dtype: torch.dtype) -> dict[str, ProductKernel]:
    """Pack those linear layers of a model whose codes were kept (``codes.keep_codes``).

    Call it when the layers are fused, and before ``pack_linears`` packs the others. Where there is
    no kernel for ``dtype`` they stay plain numbers.

    Args:
        dtype: of the model's weights.

    Returns:
        What multiplies by them, by ``int8`` and ``int4``.
    """
    used: dict[str, ProductKernel] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = codes_of(child) if isinstance(child, nn.Linear) else None
            if not isinstance(weight, LowBitWeight):
                continue
            kind = "int8" if isinstance(weight, Int8Weight) else "int4"
            kernel = low_bit_kernel(kind, dtype)
            if kernel is not None and packs(child, kernel, dtype):
                setattr(parent, name, PackedLinear(child, kernel, pack_own(weight)))
                used[kind] = kernel
    return used


def _kernel(name: str, dtype: torch.dtype, method: str) -> ProductKernel:
    kernel = low_bit_kernel(name, dtype)
    if kernel is None:
        raise DeviceError(
            f"model.quantization: {method} needs a C compiler (cc, or $CC), and model.dtype: "
            "float32 or bfloat16",
            hint=f"install one, choose another model.dtype, or take {method}_weight_only",
        )
    return kernel
