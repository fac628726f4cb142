"""Linear layers whose weights are packed once, in the layout that the kernel reads.

In ``torch.nn.functional.linear``, oneDNN or BLAS rearranges the weight in every call. On a
processor with AVX-512, oneDNN is 1.3 to 2.4 times as fast if the weight is packed once. At 8 to 32
rows, this project's C kernel is up to 1.7 times as fast as oneDNN with packed weights; at 64 rows,
both are equally fast. Because processors differ, ``kernel_choice`` times the kernels. On a CUDA
device, most weights keep their layout, and only the kernel differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from batchinfer.errors import DeviceError, ModelError
from batchinfer.kernels.low_bit import (
    Float8GroupedWeight,
    Int4Weight,
    Int8GroupedWeight,
    Int8Weight,
)
from batchinfer.worker.linear.packed_experts import pack_experts
from batchinfer.worker.linear.prequantized_weights import HostCodes, codes_of, join_codes
from batchinfer.worker.linear_kernels import (
    FLOAT8_METHOD,
    LinearKernel,
    NativeWeight,
    OwnWeight,
    PackedWeight,
    codes_kernel,
    pack_codes,
)
from batchinfer.worker.model.quantization import is_plain

_METHODS: Mapping[type, str] = {
    Int8Weight: "int8",
    Int8GroupedWeight: "int8",
    Int4Weight: "int4",
    Float8GroupedWeight: FLOAT8_METHOD,
}
"""Values of ``model.quantization``, keyed by the type of codes that the method's kernel reads."""
_HEAD_METHOD = "int8"
"""Quantization of the output head. Rounding the head to four bits would often change which logit is
the largest."""


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over a packed weight. ``packed`` is the layer's weight, if it is
    already packed for ``kernel``."""

    def __init__(
        self, linear: nn.Linear, kernel: LinearKernel, packed: PackedWeight | None = None
    ) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        # Model code may read the weight's shape and dtype. For a packed weight, a meta tensor has
        # both and takes no memory.
        self.weight = torch.empty_like(weight, device="meta") if kernel.copies else linear.weight
        self.kernel = kernel
        self.packed = packed or kernel.pack(weight)
        self.nbytes = 0
        """Bytes of the packed weight without padding; 0 if the weight is a parameter."""
        if kernel.copies:
            quantized = (
                isinstance(self.packed, OwnWeight) and self.packed.weight.dtype != weight.dtype
            )
            self.nbytes = self.packed.nbytes if quantized else weight.nbytes

    @property
    def native(self) -> NativeWeight | None:
        return self.packed if isinstance(self.packed, NativeWeight) else None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the layer's output for x [T, in_features] to the residual [T, out_features]."""
        if isinstance(self.packed, OwnWeight):
            self.packed.multiply(x, self.bias, residual, adds=True)
        else:
            residual += self.packed.times(x, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features)
        out = self.packed.times(rows, self.bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)


def merged(*linears: nn.Linear) -> nn.Linear:
    """Return a layer that concatenates the outputs of ``linears``, which have the same input."""
    first = linears[0]
    widths = [linear.out_features for linear in linears]
    joined = nn.Linear(first.in_features, sum(widths), bias=False, device="meta")
    weights = torch.cat([linear.weight.detach() for linear in linears])
    joined.weight = nn.Parameter(weights, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            linear.weight.new_zeros(width) if linear.bias is None else linear.bias.detach()
            for linear, width in zip(linears, widths, strict=True)
        ]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    join_codes(joined, linears)
    return joined


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module | None]) -> int:
    """Replace the linear layers for which ``make`` returns a replacement. Layers are replaced one
    at a time, so that each layer's weight is freed before the next layer is packed.

    Returns:
        The number of replaced layers.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (replacement := make(child)) is not None:
                setattr(parent, name, replacement)
                count += 1
    return count


def pack_linears(
    model: nn.Module, kernel: LinearKernel, dtype: torch.dtype, but: nn.Module | None = None
) -> int:
    """Pack the linear layers of a model that ``kernel`` supports, except the layer ``but``. Return
    the number of packed layers."""

    def pack(linear: nn.Linear) -> PackedLinear | None:
        fits = linear is not but and packs(linear, kernel, dtype)
        return PackedLinear(linear, kernel) if fits else None

    return replace_linears(model, pack)


def packs(linear: object, kernel: LinearKernel, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    """Return True if a layer has weights of ``dtype`` that ``kernel`` can multiply by."""
    return (
        is_plain(linear)
        and linear.weight.dtype == dtype
        and linear.weight.numel() > 0
        and kernel.takes(linear.weight)
    )


def quantize_packed(model: Any, method: str, dtype: torch.dtype) -> LinearKernel:
    """Quantize and pack the weights of a model's linear layers and experts.

    Implements ``model.quantization: int8``, ``int4`` and ``fp8`` on a CPU. Call this after layers
    are fused. The output head gets int8 weights, or keeps its dtype with ``fp8``.

    An int8 weight has a scale for each output; an int4 weight has a scale and a zero point for
    every 64 columns of an output. Before an input row is multiplied by an int8 or int4 weight, the
    row is rounded to int8 with a scale that makes its largest number 127. (torchao's
    ``Int8DynamicActivationInt8WeightConfig`` scales to 127.5, so its results differ by the rounding
    error.) A float8 weight has a scale for each 128 x 128 block, and input rows are not rounded.

    Args:
        method: one of ``linear_kernels.ON_CPU``.

    Returns:
        The layers' kernel.

    Raises:
        DeviceError: this machine has no kernel for ``dtype``.
        ModelError: the model has no linear layers that can be quantized.
    """
    kernel, head = codes_kernel(method, dtype), model.get_output_embeddings()
    if kernel is None:
        raise DeviceError(
            f"model.quantization: {method} needs a C compiler (cc, or $CC), and model.dtype: "
            "float32 or bfloat16",
            hint="install a C compiler, choose another model.dtype, or use int8_weight_only",
        )
    prequantized = any(isinstance(module, PackedLinear) for module in model.modules())
    if not pack_linears(model, kernel, dtype, but=head) and not prequantized:
        raise no_linears(model)
    head_kernel = codes_kernel(_HEAD_METHOD, dtype)
    if method != FLOAT8_METHOD and head_kernel is not None:
        pack_linears(model, head_kernel, dtype)
    pack_experts(model, kernel, dtype, as_saved=True)
    return kernel


def no_linears(model: Any) -> ModelError:
    return ModelError(
        f"model.quantization: models of the family {model.config.model_type!r} have no linear "
        "layers that can be quantized",
        hint="remove the key",
    )


def pack_prequantized(model: nn.Module, dtype: torch.dtype) -> dict[str, LinearKernel]:
    """Pack the linear layers whose codes were kept (``prequantized_weights.keep_codes``).

    Call this after layers are fused and before ``pack_linears`` packs the other layers. If no
    kernel supports ``dtype``, the weights stay floating-point numbers.

    Returns:
        The kernels used, keyed by ``int8``, ``int4`` or ``fp8``.
    """
    used: dict[str, LinearKernel] = {}

    def pack(linear: nn.Linear) -> PackedLinear | None:
        codes = codes_of(linear)
        if not isinstance(codes, HostCodes):
            return None
        method = _METHODS[type(codes)]
        kernel = codes_kernel(method, dtype)
        if kernel is None or not packs(linear, kernel, dtype):
            return None
        used[method] = kernel
        return PackedLinear(linear, kernel, pack_codes(codes, dtype))

    replace_linears(model, pack)
    return used
