"""Linear layers with 4-bit weights on a CUDA device.

Weights stay in 4 bits, and rows keep their dtype. This speeds up steps with few rows, which spend
most of their time reading weights (``kernels/int4_linear.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from batchinfer.kernels.int4_words import Int4Words, can_pack
from batchinfer.kernels.low_bit import Int4Weight
from batchinfer.worker.linear.packed_linear import PackedLinear, no_linears, packs, replace_linears
from batchinfer.worker.linear.prequantized_weights import codes_of
from batchinfer.worker.linear_kernels import LOW_BIT_METHODS, LinearKernel, OwnWeight

_METHOD = "int4"


class Int4PackedWeight(OwnWeight):
    """A 4-bit weight for the Triton kernel.

    Args:
        words: the packed codes and their scales.
        batch_invariant: True to give a row the same bits in any batch.
    """

    def __init__(self, words: Int4Words, *, batch_invariant: bool) -> None:
        super().__init__(words.words, words.outputs)
        self.words, self._batch_invariant = words, batch_invariant

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def multiply(
        self, rows: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, adds: bool
    ) -> None:
        from batchinfer.kernels.int4_linear import int4_linear

        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        int4_linear(
            rows,
            self.words,
            out=out,
            bias=bias,
            adds=adds,
            batch_invariant=self._batch_invariant,
        )


def int4_kernel(*, batch_invariant: bool) -> LinearKernel:
    """Return the kernel for weights that are rounded to 4 bits, as on a CPU.

    Args:
        batch_invariant: True to give a row the same bits in any batch.
    """

    def pack(weight: torch.Tensor) -> Int4PackedWeight:
        rounded = LOW_BIT_METHODS[_METHOD](weight)
        assert isinstance(rounded, Int4Weight)
        return _packed(rounded, weight, batch_invariant=batch_invariant)

    return LinearKernel("own", "Triton int4", batch_invariant, pack)


def quantize_int4(model: Any, *, batch_invariant: bool = False) -> str:
    """Store the weights of a model's linear layers in 4 bits, except the output head and the
    routers of fused mixtures of experts, where rounding would change choices.

    Implements ``model.quantization: int4`` on a CUDA device. Call this after layers are fused.
    4-bit weights of the checkpoint are used as saved, if the kernel supports their format. All
    other weights are rounded.

    Args:
        model: transformers' causal language model, on its device.
        batch_invariant: True to give a row the same bits in any batch.

    Returns:
        The name of the kernel for logs and manifests.

    Raises:
        ModelError: the model has no linear layers that can be quantized.
    """
    kernel = int4_kernel(batch_invariant=batch_invariant)
    kept = {getattr(module, "router", None) for module in model.modules()}
    kept.add(model.get_output_embeddings())

    def pack(linear: nn.Linear) -> PackedLinear | None:
        if linear in kept or not packs(linear, kernel, linear.weight.dtype):
            return None
        saved = codes_of(linear)
        if not isinstance(saved, Int4Weight) or not can_pack(saved):
            return PackedLinear(linear, kernel)
        weight = linear.weight.detach()
        return PackedLinear(linear, kernel, _packed(saved, weight, batch_invariant=batch_invariant))

    if not replace_linears(model, pack):
        raise no_linears(model)
    return kernel.instructions


def _packed(codes: Int4Weight, like: torch.Tensor, *, batch_invariant: bool) -> Int4PackedWeight:
    """Pack codes on the device of ``like``, for rows of its dtype."""
    tensors: dict[str, Any] = {
        name: value.to(like.device)
        for name, value in vars(codes).items()
        if isinstance(value, torch.Tensor)
    }
    order = tensors.pop("order", None)  # checked on the host already
    words = Int4Words.packed(replace(codes, **tensors, order=None), like.dtype)
    words = replace(words, order=order)
    return Int4PackedWeight(words, batch_invariant=batch_invariant)
