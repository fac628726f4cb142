"""Linear layers with float8 e4m3fn weights in blocks of 128 x 128, on a CUDA device.

A float8 weight takes half as much memory as a 16-bit weight. Float8 therefore speeds up steps with
few rows, which spend most of their time reading weights. From compute capability 8.9 on, input rows
are rounded to float8 too, in groups of 128 columns. Tensor cores multiply float8 numbers twice as
fast as 16-bit numbers (``kernels/fp8_linear.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.worker.linear.packed_linear import PackedLinear, no_linears, packs, replace_linears
from batchinfer.worker.linear.prequantized_weights import Float8Weight, codes_of
from batchinfer.worker.linear_kernels import LinearKernel, OwnWeight

_FLOAT8_TENSOR_CORES = 89
"""Lowest compute capability with float8 matrix instructions."""


class Float8PackedWeight(OwnWeight):
    """A float8 weight for the Triton kernel. If ``rows_too``, input rows are rounded to float8 as
    well."""

    def __init__(self, weight: Float8Weight, *, rows_too: bool) -> None:
        super().__init__(weight.codes, len(weight.codes))
        self.scales, self._rows_too = weight.scales, rows_too

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes

    def multiply(
        self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, adds: bool
    ) -> None:
        from batchinfer.kernels.fp8_blocks import quantize_groups
        from batchinfer.kernels.fp8_linear import fp8_linear

        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        x, x_scales = rows, None
        if self._rows_too:
            x = rows.new_empty(rows.shape, dtype=self.weight.dtype)
            x_scales = self.scales.new_empty(self.scales.shape[1], len(rows))
            quantize_groups(rows, codes=x, scales=x_scales)
        fp8_linear(x, self.weight, self.scales, out=out, x_scales=x_scales, bias=bias, adds=adds)


def fp8_kernel(*, rows_too: bool) -> LinearKernel:
    """Return the kernel for float8 weights, in which each block is scaled so that its largest
    number is 448. If ``rows_too``, input rows are rounded to float8 as well."""

    def pack(weight: torch.Tensor) -> Float8PackedWeight:
        from batchinfer.kernels.fp8_blocks import quantize_blocks

        return Float8PackedWeight(Float8Weight(*quantize_blocks(weight)), rows_too=rows_too)

    rows = "float8" if rows_too else "16 bits"
    return LinearKernel("own", f"Triton float8, rows of {rows}", True, pack)


def quantize_fp8(model: Any) -> str:
    """Round the weights of a model's linear layers to float8, except the output head and fused
    routers.

    Implements ``model.quantization: fp8``. Call this after layers are fused. Weights that were
    saved in float8 are not rounded again.

    Returns:
        The name of the kernel for logs and manifests.

    Raises:
        ModelError: the model has no linear layers that can be quantized.
    """
    from batchinfer.kernels.launch import compute_capability

    device = next(model.parameters()).device
    rows_too = compute_capability(device) >= _FLOAT8_TENSOR_CORES
    kernel, head = fp8_kernel(rows_too=rows_too), model.get_output_embeddings()

    def pack(linear: nn.Linear) -> PackedLinear | None:
        if (
            linear is head
            or hasattr(linear, "is_router")
            or not packs(linear, kernel, linear.weight.dtype)
        ):
            return None
        saved = codes_of(linear)
        if not isinstance(saved, Float8Weight):
            return PackedLinear(linear, kernel)
        saved = Float8Weight(saved.codes.to(device), saved.scales.to(device))
        return PackedLinear(linear, kernel, Float8PackedWeight(saved, rows_too=rows_too))

    if not replace_linears(model, pack):
        raise no_linears(model)
    return kernel.instructions
