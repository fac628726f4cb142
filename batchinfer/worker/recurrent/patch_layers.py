"""Patches a model's recurrent layers to keep their state in the KV pool.

In transformers, a recurrent layer's ``forward`` ignores where sequences begin in a packed row, so
this module replaces the method. The layer keeps its projections, so that they can be quantized,
packed and extended with adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from batchinfer.worker.recurrent import gated_delta_net, mamba1, mamba2, short_conv

_FORWARDS: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(gated_delta_net.FAMILIES, gated_delta_net.forward),
    **dict.fromkeys(mamba1.LAYERS, mamba1.forward),
    **dict.fromkeys(mamba2.LAYERS, mamba2.forward),
    **dict.fromkeys(short_conv.LAYERS, short_conv.forward),
}
"""Functions that replace ``forward``, keyed by the name of transformers' class."""


def page_recurrent_state(model: nn.Module) -> None:
    """Make a model's recurrent layers keep their state in the pool of the forward context."""
    for module in model.modules():
        layer: Any = module
        if forward := _FORWARDS.get(type(layer).__name__):
            layer.forward = MethodType(forward, layer)
        if type(layer).__name__ == "Zamba2Attention":
            layer.register_forward_pre_hook(_name_layer, with_kwargs=True)


def _name_layer(attention: Any, _: Any, options: dict[str, Any]) -> None:
    """Set ``layer_idx`` of an attention module that several layers share to the running layer's
    number."""
    attention.layer_idx = options["layer_idx"]
