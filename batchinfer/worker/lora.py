"""Adds LoRA adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) to what linear layers give.

A layer computes ``x @ weight.T`` for every row of a step as it would without adapters, from
whatever its weight is stored in. Then ``(x @ A.T) @ B.T`` is added to the rows of each adapter that
the step uses, one adapter after the other: rows of one share its two small products (the idea of
SGMV, Chen et al. 2023, https://arxiv.org/abs/2310.18547). Rows without an adapter are not touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from batchinfer.worker.attention import current_context
from batchinfer.worker.linear import PackedLinear, packs
from batchinfer.worker.product_kernels import ProductKernel


class Factors(NamedTuple):
    """What one adapter adds to a slice of a layer's outputs."""

    down: torch.Tensor  # [rank, in], A
    up: torch.Tensor  # [out, rank], B times the adapter's scale
    start: int
    """The slice's first output."""


class _OfOne(nn.Module):
    """One adapter's factors of one layer: its A matrices side by side, each B for itself."""

    def __init__(self, factors: list[Factors], kernel: ProductKernel | None) -> None:
        super().__init__()
        self._down = _linear(torch.cat([one.down for one in factors]), kernel)
        self._ups = nn.ModuleList(_linear(one.up, kernel) for one in factors)
        ranks = [len(one.down) for one in factors]
        ends = torch.tensor(ranks).cumsum(0).tolist()
        self._slices = [
            (slice(end - rank, end), slice(one.start, one.start + len(one.up)))
            for one, rank, end in zip(factors, ranks, ends, strict=True)
        ]

    def add(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add to ``rows`` [n] of ``out`` [T, out] what they come to of ``x`` [T, in]."""
        lowered = self._down(x.index_select(0, rows))
        for up, (inner, outer) in zip(self._ups, self._slices, strict=True):
            out[:, outer].index_add_(0, rows, up(lowered[:, inner]))


class LoraSum(nn.Module):
    """The adapters of one linear layer; a forward hook of it.

    Args:
        kernel: what multiplies by the adapters' matrices; None: torch does.
    """

    def __init__(self, kernel: ProductKernel | None) -> None:
        super().__init__()
        self._kernel = kernel
        self._by_adapter: dict[int, _OfOne] = {}

    def put(self, adapter: int, factors: list[Factors]) -> None:
        """Take an adapter's factors."""
        one = _OfOne(factors, self._kernel)
        self._by_adapter[adapter] = one
        self.add_module(str(adapter), one)

    def forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        """Add to ``output`` [..., out], contiguous, in place; ``arguments`` are the layer's x."""
        context = current_context()
        if context.adapters is None:
            return
        x, out = arguments[0], output.view(-1, output.shape[-1])
        x = x.reshape(-1, x.shape[-1])
        if len(x) != len(context.tensors["positions"]):
            raise RuntimeError(f"a {type(layer).__name__} takes some of a step's rows only")
        for adapter, rows in context.adapters.each(context.tensors["adapter_tokens"]):
            one = self._by_adapter.get(adapter)
            if one is not None:
                one.add(x, rows, out)


def _linear(weight: torch.Tensor, kernel: ProductKernel | None) -> nn.Module:
    """A layer without bias; on a CPU packed, so that rows do not depend on each other."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if kernel is None or not packs(linear, kernel, weight.dtype):
        return linear
    return PackedLinear(linear, kernel)
