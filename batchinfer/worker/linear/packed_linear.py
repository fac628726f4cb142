"""Linear layers whose weights are packed once in the layout that the kernel reads.

In ``torch.nn.functional.linear``, oneDNN or BLAS rearranges the weight in every call. On a
processor with AVX-512, oneDNN's packed product is 1.3 to 2.4 times as fast as ``linear``, and the
project's own kernel up to 1.7 times as fast as that at 8 to 32 rows, and equally fast at 64. On
other processors the kernels are timed (``choice``). On a CUDA device weights stay as they are; only
the kernel differs.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from batchinfer.worker.linear.codes import HostCodes, codes_of, join_codes
from batchinfer.worker.linear.experts import pack_experts
from batchinfer.worker.linear_kernels import (
    FLOAT8_METHOD,
    LinearKernel,
    OwnPacked,
    codes_kernel,
)
from batchinfer.worker.linear_kernels import pack_codes as pack_weight
from batchinfer.worker.model.quantization import is_plain

_METHODS: Mapping[type, str] = {
    Int8Weight: "int8",
    Int8GroupedWeight: "int8",
    Int4Weight: "int4",
    Float8GroupedWeight: FLOAT8_METHOD,
}
"""Values of ``model.quantization`` by the codes that their kernels multiply by."""
_HEAD_METHOD = "int8"
"""A head's outputs are compared with each other, and four bits would change the largest."""


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` over a packed weight.

    Args:
        linear: a layer that ``kernel`` takes.
        packed: the layer's weight, packed for ``kernel``; None: pack it.
    """

    def __init__(
        self, linear: nn.Linear, kernel: LinearKernel, packed: OwnPacked | None = None
    ) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        # For model code that asks for shape and dtype; it holds no memory if the weight is packed.
        self.weight = torch.empty_like(weight, device="meta") if kernel.copies else linear.weight
        self.kernel = kernel
        self._packed = packed or kernel.pack(weight)
        own = self.own
        self.nbytes = 0
        """Bytes of the packed weight, unless it is a parameter."""
        if kernel.copies:
            quantized = own is not None and own.weight.dtype != weight.dtype
            self.nbytes = own.weight.nbytes if own and quantized else weight.nbytes

    @property
    def own(self) -> OwnPacked | None:
        """The packed weight, if the project's own kernel for a CPU multiplies by it."""
        return self._packed if isinstance(self._packed, OwnPacked) else None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product of x [T, in_features] to the residual [T, out_features]."""
        packed: Any = self._packed
        if self.kernel.kind == "own":
            packed.add_times(x, self.bias, residual)
        else:
            residual += packed.times(x, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features)
        out = self._packed.times(rows, self.bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)


def merged(*linears: nn.Linear) -> nn.Linear:
    """Return one layer that concatenates the outputs of ``linears``, which have the same input."""
    first = linears[0]
    widths = [linear.out_features for linear in linears]
    one = nn.Linear(first.in_features, sum(widths), bias=False, device="meta")
    weights = torch.cat([linear.weight.detach() for linear in linears])
    one.weight = nn.Parameter(weights, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            linear.weight.new_zeros(width) if linear.bias is None else linear.bias.detach()
            for linear, width in zip(linears, widths, strict=True)
        ]
        one.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    join_codes(one, linears)
    return one


def pack_linears(
    model: nn.Module, kernel: LinearKernel, dtype: torch.dtype, but: nn.Module | None = None
) -> int:
    """Pack the linear layers of a model that ``kernel`` takes, one at a time.

    Args:
        but: a layer to leave as it is.

    Returns:
        The number of packed layers.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is not but and packs(child, kernel, dtype):
                setattr(parent, name, PackedLinear(child, kernel))
                count += 1
    return count


def packs(linear: object, kernel: LinearKernel, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    """Whether ``kernel``, for weights of ``dtype``, multiplies by a layer's weight."""
    return (
        is_plain(linear)
        and linear.weight.dtype == dtype
        and linear.weight.numel() > 0
        and kernel.takes(linear.weight)
    )


def quantize_packed(model: Any, method: str, dtype: torch.dtype) -> LinearKernel:
    """Quantize and pack the weights of a model's linear layers and experts; the output head's to
    int8, or with float8 not at all.

    ``model.quantization: int8``, ``int4`` or ``fp8``; call it after layers are fused. An int8
    weight has a scale for each output, an int4 weight a scale and a zero for each 64 columns of an
    output. Each row gets a scale when it is multiplied, so that its largest number becomes 127.
    (torchao's ``Int8DynamicActivationInt8WeightConfig`` scales it to 127.5 before rounding, so
    results differ by the rounding error.) A float8 weight has a scale for each 128 x 128 block; its
    rows are not rounded.

    Args:
        model: one of transformers' for text.
        method: one of ``linear_kernels.ON_CPU``.
        dtype: of its weights.

    Returns:
        The layers' kernel.

    Raises:
        DeviceError: there is no kernel for ``dtype`` here.
        ModelError: the model has no such layers.
    """
    kernel, head = codes_kernel(method, dtype), model.get_output_embeddings()
    if kernel is None:
        raise DeviceError(
            f"model.quantization: {method} needs a C compiler (cc, or $CC), and model.dtype: "
            "float32 or bfloat16",
            hint="install one, choose another model.dtype, or use int8_weight_only",
        )
    prequantized = any(isinstance(module, PackedLinear) for module in model.modules())
    if not pack_linears(model, kernel, dtype, but=head) and not prequantized:
        raise ModelError(
            f"model.quantization: models of the family {model.config.model_type!r} have no linear "
            "layers that can be quantized"
        )
    head_kernel = codes_kernel(_HEAD_METHOD, dtype)
    if method != FLOAT8_METHOD and head_kernel is not None:
        pack_linears(model, head_kernel, dtype)
    pack_experts(model, kernel, dtype, as_saved=True)
    return kernel


def pack_codes(model: nn.Module, dtype: torch.dtype) -> dict[str, LinearKernel]:
    """Pack the linear layers of a model whose codes were kept (``codes.keep_codes``).

    Call it after layers are fused and before ``pack_linears`` packs the others. Without a kernel
    for ``dtype``, weights stay plain numbers.

    Args:
        dtype: of the model's weights.

    Returns:
        The kernels used, by ``int8``, ``int4`` and ``fp8``.
    """
    used: dict[str, LinearKernel] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = codes_of(child) if isinstance(child, nn.Linear) else None
            if not isinstance(weight, HostCodes):
                continue
            method = _METHODS[type(weight)]
            kernel = codes_kernel(method, dtype)
            if kernel is not None and packs(child, kernel, dtype):
                setattr(parent, name, PackedLinear(child, kernel, pack_weight(weight, dtype)))
                used[method] = kernel
    return used
