"""Fuses the input projections of a Gated DeltaNet layer into one matrix multiplication."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.worker.fusion.fused_modules import keep_plain_attributes, starts_of
from batchinfer.worker.linear.packed_linear import merged
from batchinfer.worker.linear.prequantized_weights import has_codes
from batchinfer.worker.model.quantization import is_plain
from batchinfer.worker.recurrent.gated_delta_net import (
    FAMILIES,
    LayerInputs,
    run_layer,
    weights_of,
)

_BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")
"""Projections of Qwen3-Next, whose outputs are ordered by key head."""


class FusedGatedDeltaNet(nn.Module):
    """Gated DeltaNet with one matrix multiplication for queries, keys, values, gates and decays."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        keep_plain_attributes(self, layer)
        family = FAMILIES[type(layer).__name__]
        names = _BY_KEY_HEAD if family.by_key_head else family.projections
        linears = [layer.get_submodule(name) for name in names]
        self.orders: dict[str, torch.Tensor] = {}
        """Numbers of the outputs of transformers' projections, in the order of ``in_proj``."""
        self.widths: tuple[int, ...]
        """Number of outputs of ``in_proj`` for each field of ``LayerInputs``."""
        if family.by_key_head:
            orders, self.widths = _orders(layer)
            self.orders = dict(zip(names, orders, strict=True))
            linears = [_reordered(*pair) for pair in zip(linears, orders, strict=True)]
        else:
            self.widths = (
                sum(linear.out_features for linear in linears[: len(family.qkv)]),
                *(linear.out_features for linear in linears[len(family.qkv) :]),
            )
        self.in_proj = merged(*linears)
        self.layer = int(layer.layer_idx)
        self.starts = starts_of(layer, "in_proj", names)
        self.output = family.output
        for name in (family.output, *family.second_projections):
            self._keep(name, layer.get_submodule(name))
        self._family = family
        self.weights = weights_of(layer, family)
        self.projects_twice = bool(family.second_projections)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Return True if a module is a Gated DeltaNet layer whose projections can be merged."""
        family = FAMILIES.get(type(layer).__name__)
        if family is None:
            return False
        names = _BY_KEY_HEAD if family.by_key_head else family.projections
        linears: list[Any] = [layer.get_submodule(name) for name in names]
        if not all(map(is_plain, linears)):
            return False
        return not family.by_key_head or all(
            linear.weight.is_cuda and linear.bias is None and not has_codes(linear)
            for linear in linears
        )

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        inputs = LayerInputs(*self.in_proj(hidden_states[0]).split(self.widths, dim=1))
        inputs = self._family.projected_again(self, inputs)
        output: torch.Tensor = getattr(self, self.output)(
            run_layer(inputs, self.weights, self.layer)
        )
        return output[None]

    def _keep(self, name: str, module: nn.Module) -> None:
        """Keep a module of transformers' layer under its name there, so that adapters find the
        module."""
        *parents, name = name.split(".")
        place: nn.Module = self
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.add_module(name, module)


def _orders(layer: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, ...]]:
    """Return where the outputs of Qwen3-Next's two projections are, in the order of the fields of
    ``LayerInputs``, and the widths of these fields."""
    first, second = (getattr(layer, name) for name in _BY_KEY_HEAD)
    numbers = (
        torch.arange(linear.out_features, device=linear.weight.device)[None, None]
        for linear in (first, second)
    )
    parts = layer.fix_query_key_value_ordering(*numbers)
    query, key, value, gate, beta, decay = (part.flatten() for part in parts)
    qkv = torch.cat([query, key, value])
    orders = torch.cat([qkv, gate]), torch.cat([decay, beta])
    return orders, (len(qkv), len(gate), len(decay), len(beta))


def _reordered(linear: nn.Linear, order: torch.Tensor) -> nn.Linear:
    """Return a layer with the outputs of ``linear`` in another order."""
    result = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    result.weight = nn.Parameter(linear.weight.detach()[order], requires_grad=False)
    return result
