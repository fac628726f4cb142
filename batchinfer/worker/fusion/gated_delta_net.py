"""Fuses the input projections of a Gated DeltaNet layer into one matrix multiplication."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.worker.fusion.fused_modules import keep_plain_attributes, starts_of
from batchinfer.worker.linear.packed_linear import merged
from batchinfer.worker.model.quantization import is_plain
from batchinfer.worker.recurrent.gated_delta_net import (
    FAMILIES,
    LayerInputs,
    run_layer,
    weights_of,
)


class FusedGatedDeltaNet(nn.Module):
    """Gated DeltaNet with one matrix multiplication for queries, keys, values, gates and decays."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        keep_plain_attributes(self, layer)
        family = FAMILIES[type(layer).__name__]
        linears = [layer.get_submodule(name) for name in family.projections]
        self.in_proj = merged(*linears)
        self.layer = int(layer.layer_idx)
        self.starts = starts_of(layer, "in_proj", family.projections)
        self.output = family.output
        for name in (family.output, *family.second_projections):
            self._keep(name, layer.get_submodule(name))
        self._family = family
        self.weights = weights_of(layer, family)
        self.widths = (
            sum(linear.out_features for linear in linears[: len(family.qkv)]),
            *(linear.out_features for linear in linears[len(family.qkv) :]),
        )
        """Number of outputs of ``in_proj`` for each field of ``LayerInputs``."""
        self.projects_twice = bool(family.second_projections)

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Return True if a module is a Gated DeltaNet layer whose projections can be merged."""
        family = FAMILIES.get(type(layer).__name__)
        if family is None or family.by_key_head:
            return False
        return all(is_plain(layer.get_submodule(name)) for name in family.projections)

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
