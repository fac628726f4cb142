"""Joins a model's decoder layers into one call, where the model calls them as that would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.fusion.native_layers import NativeDecoderLayers
from batchinfer.worker.probe import ModuleCall, Probe, record_calls

_TOKENS = (3, 7, 5, 3)


@torch.inference_mode()
def join_native_layers(model: nn.Module, layout: KVLayout) -> None:
    """Join all layers into one call where all were swapped, and the model calls them as that would.

    That is with the same rotary positions, each with what the one before it gave; and the model
    gives the same bits when they are joined.
    """
    probe = Probe(model, layout, _TOKENS)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            parts = _parts_to_join(child)
            if not parts:
                continue
            with record_calls(parts) as calls:
                expected = probe.logits()
            if not _pass_on_one_tensor(calls, parts):
                continue
            layers = [layer for part in parts for layer in part.layers]
            joined = NativeDecoderLayers(layers, parts[0].workspace)
            setattr(parent, name, nn.ModuleList([joined]))
            if not _gives(expected, probe):
                setattr(parent, name, child)


def _parts_to_join(child: Any) -> list[NativeDecoderLayers]:
    if not isinstance(child, nn.ModuleList):
        return []
    parts = [part for part in child if isinstance(part, NativeDecoderLayers)]
    return parts if len(parts) == len(child) > 1 else []


def _pass_on_one_tensor(calls: list[ModuleCall], layers: list[NativeDecoderLayers]) -> bool:
    """Whether each layer was called once, in order, with one and the same tensor (which layers
    change in place) and the same rotary positions. Those are compared as objects: what they hold
    may be alike at a few positions and differ at others."""
    hidden, rotary = calls[0].arguments[0], calls[0].options["position_embeddings"]
    return [call.module for call in calls] == layers and all(
        call.arguments[0] is hidden and call.options["position_embeddings"] is rotary
        for call in calls
    )


def _gives(expected: torch.Tensor, probe: Probe) -> bool:
    try:
        return torch.equal(probe.logits(), expected)
    except Exception:  # the model's own code looks at its layers in another way
        return False
