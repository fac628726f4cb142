"""Joins a model's decoder layers into one call, where the model calls them as that would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.native_layers import NativeDecoderLayers, Rotary
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.probe_step import probe_step

_TOKENS = (3, 7, 5, 3)


@torch.inference_mode()
def join_native_layers(model: nn.Module, layout: KVLayout) -> None:
    """Make all layers one call where all were swapped, and the model calls them as that would.

    That is with the same rotary positions, each with what the one before it gave; and the model
    gives the same bits when they are joined.
    """
    weight = next(model.parameters())
    step = probe_step(_TOKENS, 1, layout, range(len(_TOKENS)))
    cache = KVCache(layout, step.block_tables.size, weight.device, weight.dtype)

    def logits() -> torch.Tensor:
        return forward(model, cache, make_backend(cache), step)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            parts = _parts_to_join(child)
            if not parts:
                continue
            calls = _Calls(parts)
            before = calls.during(logits)
            if not calls.pass_on_one_tensor():
                continue
            layers = [layer for part in parts for layer in part.layers]
            joined = NativeDecoderLayers(layers, parts[0].workspace)
            setattr(parent, name, nn.ModuleList([joined]))
            if not _gives(before, logits):
                setattr(parent, name, child)


def _parts_to_join(child: Any) -> list[NativeDecoderLayers]:
    if not isinstance(child, nn.ModuleList):
        return []
    parts = [part for part in child if isinstance(part, NativeDecoderLayers)]
    return parts if len(parts) == len(child) > 1 else []


class _Calls:
    """What layers are called with, and in which order."""

    def __init__(self, layers: list[NativeDecoderLayers]) -> None:
        self._layers = layers
        self._seen: list[tuple[nn.Module, torch.Tensor, Rotary]] = []

    def during(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``run`` gives."""
        hooks = [
            layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self._layers
        ]
        try:
            return run()
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, layer: nn.Module, arguments: Any, options: Any) -> None:
        self._seen.append((layer, arguments[0], options["position_embeddings"]))

    def pass_on_one_tensor(self) -> bool:
        """Whether each was called once, in order, with one and the same tensor (which layers
        change in place) and the same rotary positions. Those are compared as objects: what they
        hold may be alike at a few positions and differ at others."""
        _, hidden, rotary = self._seen[0]
        return (
            [layer for layer, _, _ in self._seen] == self._layers
            and all(each is hidden for _, each, _ in self._seen)
            and all(each is rotary for _, _, each in self._seen)
        )


def _gives(expected: torch.Tensor, run: Callable[[], torch.Tensor]) -> bool:
    try:
        return torch.equal(run(), expected)
    except Exception:  # the model's own code looks at its layers in another way
        return False
