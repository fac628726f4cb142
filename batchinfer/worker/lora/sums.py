"""Forward hooks that add adapters to the output of one linear layer.

On a CPU adapters are computed one after the other, each with two small products for all of its rows
(the idea of SGMV, Chen et al. 2023, https://arxiv.org/abs/2310.18547). On a CUDA device one kernel
computes all adapters. Rows without an adapter are not touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from batchinfer.worker.attention.attention import current_context
from batchinfer.worker.linear.packed_linear import PackedLinear, packs
from batchinfer.worker.linear_kernels import LinearKernel


class Factors(NamedTuple):
    """One adapter's factors for a slice of a layer's outputs."""

    down: torch.Tensor  # [rank, in], A
    up: torch.Tensor  # [out, rank], B times the adapter's scale
    start: int
    """The slice's first output."""


class LoraSum(nn.Module):
    """The adapters of one linear layer on a CPU.

    Args:
        kernel: multiplies by the adapters' matrices; None: torch does.
    """

    def __init__(self, kernel: LinearKernel | None) -> None:
        super().__init__()
        self._kernel = kernel
        self._by_adapter: dict[int, _LayerFactors] = {}

    def put(self, adapter: int, factors: list[Factors]) -> None:
        """Add an adapter's factors."""
        layer_factors = _LayerFactors(factors, self._kernel)
        self._by_adapter[adapter] = layer_factors
        self.add_module(str(adapter), layer_factors)

    def forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        """Add to ``output`` [..., out], contiguous, in place; ``arguments`` are the layer's x."""
        context = current_context()
        if context.adapters is None:
            return
        x, out = _as_matrices(layer, arguments[0], output)
        for adapter, rows in context.adapters.each(context.tensors["adapter_tokens"]):
            factors = self._by_adapter.get(adapter)
            if factors is not None:
                factors.add(x, rows, out)


class _LayerFactors(nn.Module):
    """One adapter's factors of one layer: A matrices concatenated, B matrices separate."""

    def __init__(self, factors: list[Factors], kernel: LinearKernel | None) -> None:
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
        """Add the product of the factors and ``x`` [T, in] to ``rows`` [n] of ``out`` [T, out]."""
        lowered = self._down(x.index_select(0, rows))
        for up, (inner, outer) in zip(self._ups, self._slices, strict=True):
            out[:, outer].index_add_(0, rows, up(lowered[:, inner]))


def _linear(weight: torch.Tensor, kernel: LinearKernel | None) -> nn.Module:
    """A layer without bias; on a CPU packed, so that rows do not depend on each other."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if kernel is None or not packs(linear, kernel, weight.dtype):
        return linear
    return PackedLinear(linear, kernel)


class _Slice(NamedTuple):
    """Outputs of a layer that adapters add to."""

    start: int
    width: int


class StackedLoraSum(nn.Module):
    """The adapters of one linear layer on a CUDA device, stacked.

    The kernels read on the device which rows use which adapter, so that their launches can be
    captured. Adapters of a lower rank than others, or without a slice that others have, are padded
    with zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self._factors: dict[int, list[Factors]] = {}
        self._ranks: dict[_Slice, slice] = {}
        self._down: torch.Tensor  # [adapters, ranks of all slices, in]
        self._ups: dict[_Slice, torch.Tensor] = {}  # [adapters, out, rank] each

    def put(self, adapter: int, factors: list[Factors]) -> None:
        """Add an adapter's factors; they are copied."""
        self._factors[adapter] = factors
        self._stack(factors[0].down)

    def _stack(self, like: torch.Tensor) -> None:
        most: dict[_Slice, int] = {}
        for one in (one for factors in self._factors.values() for one in factors):
            key = _slice_of(one)
            most[key] = max(most.get(key, 0), len(one.down))
        end, num_adapters = 0, max(self._factors)
        for key, rank in most.items():
            self._ranks[key] = slice(end, end + rank)
            end += rank
        down = like.new_zeros(num_adapters, end, like.shape[1])
        ups = {key: like.new_zeros(num_adapters, key.width, rank) for key, rank in most.items()}
        for adapter, factors in self._factors.items():
            for at, one in enumerate(factors):
                key, rank = _slice_of(one), len(one.down)
                into = down[adapter - 1, self._ranks[key]][:rank], ups[key][adapter - 1, :, :rank]
                into[0].copy_(one.down)
                into[1].copy_(one.up)
                factors[at] = Factors(*into, one.start)  # frees the tensors it was copied from
        self.register_buffer("_down", down)
        for key, up in ups.items():
            self.register_buffer(f"_up_{key.start}_{key.width}", up)
        self._ups = ups

    def forward(self, layer: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        """Add to ``output`` [..., out], contiguous, in place; ``arguments`` are the layer's x."""
        from batchinfer.kernels.lora import lora_expand, lora_shrink, num_splits

        tensors = current_context().tensors
        if "adapter_starts" not in tensors:
            return
        rows, starts = tensors["adapter_tokens"], tensors["adapter_starts"]
        x, out = _as_matrices(layer, arguments[0], output)
        pieces = (num_splits(x.shape[1]), len(rows), self._down.shape[1])
        lowered = x.new_empty(pieces, dtype=torch.float32)
        lora_shrink(x, self._down, rows, starts, lowered=lowered)
        for key, up in self._ups.items():
            own = out[:, key.start : key.start + key.width]
            lora_expand(lowered[..., self._ranks[key]], up, rows, starts, out=own)


def _slice_of(factors: Factors) -> _Slice:
    return _Slice(factors.start, len(factors.up))


def _as_matrices(
    layer: nn.Module, x: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's input and output as matrices, [T, in] and [T, out], a row for each token.

    Raises:
        RuntimeError: they are not all the tokens of the step.
    """
    x, out = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    if len(x) != len(current_context().tensors["positions"]):
        raise RuntimeError(f"a {type(layer).__name__} gets only some of a step's rows")
    return x, out
