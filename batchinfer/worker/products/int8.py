"""Rounds the weights of linear layers to int8 when they are packed for the CPU.

``model.quantization: int8``. A weight has a scale for each output, a row one that is taken when it
is multiplied, both symmetric: the largest number becomes 127. (torchao's
``Int8DynamicActivationInt8WeightConfig`` has it become 127.5 before it is rounded, so that results
differ by as much as either rounds.) The layers are packed and fused as any others; the embedding
and the output head keep their dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.product_kernels import ProductKernel, int8_kernel
from batchinfer.worker.products.linear import pack_linears


def quantize_packed(model: Any, dtype: torch.dtype) -> ProductKernel:
    """Replace a model's linear layers, all but the output head, after they have been fused.

    Args:
        model: one of transformers' for text.
        dtype: of its weights.

    Returns:
        What multiplies by them.

    Raises:
        DeviceError: there is no kernel for ``dtype`` here.
        ModelError: the model has no such layers.
    """
    kernel = int8_kernel(dtype)
    if kernel is None:
        raise DeviceError(
            "model.quantization: int8 needs a C compiler (cc, or $CC), and model.dtype: float32 or "
            "bfloat16",
            hint="install one, choose another model.dtype, or take int8_weight_only",
        )
    if not pack_linears(model, kernel, dtype, but=model.get_output_embeddings()):
        raise ModelError(
            f"model.quantization: models of the family {model.config.model_type!r} have no linear "
            "layers that can be quantised"
        )
    return kernel
