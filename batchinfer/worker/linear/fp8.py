"""Linear layers over weights of float8 e4m3fn in blocks of 128 x 128, on a CUDA device.

A weight takes one byte instead of two, which speeds up steps of few rows, as they wait for weights.
From compute capability 8.9 on, rows are rounded to float8 as well, in groups of 128 columns, and
multiplied twice as fast as in 16 bits; before that, only weights are rounded
(``kernels/fp8_linear.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.errors import ModelError
from batchinfer.worker.linear.codes import Float8Weight, codes_of
from batchinfer.worker.model.quantization import is_plain

_FLOAT8_PRODUCTS = 89
"""First compute capability that multiplies float8."""


class Fp8Linear(nn.Module):
    """``x @ weight.T + bias`` over a weight of float8 with a scale for each block.

    Args:
        codes: [out, in] float8 e4m3fn, contiguous.
        scales: [ceil(out / 128), ceil(in / 128)] float32.
        bias: [out], or None.
        dtype: of the dequantized weight.
        rows_too: round rows to float8 as well.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        rows_too: bool,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.rows_too = rows_too
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        # Shape and dtype for model code that asks for them; it holds no memory.
        self.weight = torch.empty(codes.shape, dtype=dtype, device="meta")

    @classmethod
    def quantized(cls, linear: nn.Linear, *, rows_too: bool) -> Fp8Linear:
        """Return the layer with its weight in float8: as saved, or rounded to nearest with a
        block's largest number scaled to 448."""
        from batchinfer.kernels.fp8_blocks import quantize_blocks

        weight, saved = linear.weight.detach(), codes_of(linear)
        bias = None if linear.bias is None else linear.bias.detach()
        if isinstance(saved, Float8Weight):
            codes, scales = saved.codes.to(weight.device), saved.scales.to(weight.device)
            return cls(codes, scales, bias, weight.dtype, rows_too=rows_too)
        return cls(*quantize_blocks(weight), bias, weight.dtype, rows_too=rows_too)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(len(rows), self.out_features)
        self._multiply(rows, out, adds=False)
        return out.view(*x.shape[:-1], self.out_features)

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product of x [T, in_features] to ``out`` [T, out_features], contiguous."""
        self._multiply(x, out, adds=True)

    def _multiply(self, rows: torch.Tensor, out: torch.Tensor, *, adds: bool) -> None:
        from batchinfer.kernels.fp8_blocks import quantize_groups
        from batchinfer.kernels.fp8_linear import fp8_linear

        x, x_scales = rows, None
        if self.rows_too:
            x = rows.new_empty(rows.shape, dtype=self.codes.dtype)
            x_scales = self.scales.new_empty(self.scales.shape[1], len(rows))
            quantize_groups(rows, codes=x, scales=x_scales)
        fp8_linear(
            x, self.codes, self.scales, out=out, x_scales=x_scales, bias=self.bias, adds=adds
        )


def quantize_fp8(model: Any) -> str:
    """Round the weights of a model's linear layers to float8, except the output head's.

    ``model.quantization: fp8``; call it after layers are fused. Weights that were saved in
    float8 are not rounded again.

    Args:
        model: one of transformers' for text, on its device.

    Returns:
        The name of their kernel, for users and records.

    Raises:
        ModelError: the model has no such layers.
    """
    from batchinfer.kernels.launch import compute_capability

    rows_too = compute_capability(next(model.parameters()).device) >= _FLOAT8_PRODUCTS
    head, count = model.get_output_embeddings(), 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is not head and is_plain(child) and child.weight.numel() > 0:
                setattr(parent, name, Fp8Linear.quantized(child, rows_too=rows_too))
                count += 1
    if not count:
        raise ModelError(
            f"model.quantization: models of the family {model.config.model_type!r} have no linear "
            "layers that can be quantized"
        )
    return f"Triton float8, rows {'of float8' if rows_too else 'of 16 bits'}"
