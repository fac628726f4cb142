"""The adapters of a linear layer on a CUDA device, all of them in one product after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from batchinfer.worker.attention.attention import current_context
from batchinfer.worker.lora.factors import Factors, rows_of


class _Slice(NamedTuple):
    """Outputs of a layer that adapters add to."""

    start: int
    width: int


class StackedLoraSum(nn.Module):
    """The adapters of one linear layer, stacked; a forward hook of it.

    Which rows run through which adapter is read on the device, so that what this launches can be
    captured. Adapters of a lower rank than others, or without a slice that others have, are filled
    up with zeros.
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
                factors[at] = Factors(*into, one.start)  # what it was copied from is not kept
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
        x, out = rows_of(layer, arguments[0], output)
        pieces = (num_splits(x.shape[1]), len(rows), self._down.shape[1])
        lowered = x.new_empty(pieces, dtype=torch.float32)
        lora_shrink(x, self._down, rows, starts, lowered=lowered)
        for key, up in self._ups.items():
            own = out[:, key.start : key.start + key.width]
            lora_expand(lowered[..., self._ranks[key]], up, rows, starts, out=own)


def _slice_of(factors: Factors) -> _Slice:
    return _Slice(factors.start, len(factors.up))
