"""Puts adapters into a loaded model, whatever its layers were merged into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.adapter_files import Adapter
from batchinfer.worker.attention import current_context, make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.fused_layers import FusedDecoderLayer
from batchinfer.worker.fused_modules import keep_plain_attributes
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.lora import Factors, LoraSum
from batchinfer.worker.native_layer import NativeDecoderLayers
from batchinfer.worker.probe_step import probe_step
from batchinfer.worker.product_kernels import ProductKernel

_TOKENS = (3, 7)


class LayerInParts(nn.Module):
    """A layer that is one call, but in steps with adapters runs module by module, to the same bits.

    Only there can something be added between two of its products.
    """

    def __init__(self, layer: NativeDecoderLayers) -> None:
        super().__init__()
        keep_plain_attributes(self, layer)
        self.whole = layer
        self.parts = FusedDecoderLayer(layer.layers[0])

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """[1, T, hidden], which is changed, and returned."""
        runs = self.whole if current_context().adapters is None else self.parts
        out: torch.Tensor = runs(hidden_states, **options)
        return out


def add_adapters(
    model: nn.Module,
    layout: KVLayout,
    adapters: Sequence[Adapter],
    kernel: ProductKernel | None = None,
) -> None:
    """Read the adapters' weights and let rows of a step run through them, numbered from 1.

    Args:
        model: loaded, its layers fused or not.
        layout: of a pool for it.
        adapters: checked against the model's config.
        kernel: what multiplies by their matrices; None: torch does.

    Raises:
        ModelError: naming the adapter, when its layers cannot be added to.
        DeviceError: the weights do not fit the device.
    """
    _open_up(model)
    weight = next(model.parameters())
    for number, adapter in enumerate(adapters, start=1):
        try:
            _add(model, number, adapter, weight, kernel)
            _try(model, layout, number, adapter)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"model.adapters.{adapter.name} does not fit the device") from error


def _open_up(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NativeDecoderLayers):
                setattr(parent, name, LayerInParts(child))


def _add(
    model: nn.Module,
    number: int,
    adapter: Adapter,
    like: torch.Tensor,
    kernel: ProductKernel | None,
) -> None:
    by_layer: dict[nn.Module, list[Factors]] = {}
    for target in adapter.targets:
        layer, start = _find(model, target.module)
        down, up = (factor.to(like.device, like.dtype) for factor in adapter.factors(target))
        by_layer.setdefault(layer, []).append(Factors(down, up, start))
    for layer, factors in by_layer.items():
        lora = getattr(layer, "lora", None)
        if lora is None:
            lora = LoraSum(kernel)
            layer.lora = lora
            layer.register_forward_hook(lora)
        lora.put(number, factors)


def _find(model: nn.Module, name: str) -> tuple[Any, int]:
    """What computes a linear layer of transformers' model now, and from which output on."""
    module: Any = model
    for part in name.split("."):
        if isinstance(module, LayerInParts):
            module = module.parts
        starts = getattr(module, "starts", {})
        if part in starts:
            merged_name, start = starts[part]
            return getattr(module, merged_name), start
        module = getattr(module, part)
    return module, 0


@torch.inference_mode()
def _try(model: nn.Module, layout: KVLayout, number: int, adapter: Adapter) -> None:
    """Run a few tokens through an adapter: are its layers called with a step's rows?"""
    weight = next(model.parameters())
    step = probe_step(_TOKENS, 2, layout, range(len(_TOKENS)))
    step = replace(step, adapters=np.array([number, 0], dtype=np.int32))
    cache = KVCache(layout, step.block_tables.size, weight.device, weight.dtype)
    try:
        forward(model, cache, make_backend(cache), step)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code does with its layers
        raise ModelError(
            f"model.adapters.{adapter.name} changes layers that cannot be added to: {error}"
        ) from error
