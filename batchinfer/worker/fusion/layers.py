"""Decoder layers whose last two matrix products add to the residual directly.

A layer of the Llama shape ends its attention (or recurrence) and its MLP with
``residual + x @ weight.T``. A matrix product that adds to its output costs nothing more, and saves
a pass over the hidden state that reads two tensors and writes one: two launches less per layer.
Norms then read the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.fusion.modules import keep_plain_attributes
from batchinfer.worker.model.quantization import is_plain
from batchinfer.worker.verify import Probe, Swap, swap_verified

LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Tolerance of logits by the model's dtype: fused modules round to 16 bits less often."""
PROBE_TOKENS = (3, 7, 5, 3)
_MIXERS = {"self_attn": "o_proj", "linear_attn": "out_proj"}
"""Modules in which tokens see each other, with their last products."""
_OTHER_PARTS = {"mlp", "input_layernorm", "post_attention_layernorm"}


class AddLinear(nn.Module):
    """Adds ``x @ weight.T`` to ``residual``, which the caller sets before each call.

    Args:
        linear: a plain linear layer, or a module with ``add_to``.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear: Any = linear
        self.residual: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the product of x [..., in_features] to the residual [T, out_features]."""
        residual, self.residual = self.residual, None
        assert residual is not None
        rows = x.reshape(-1, x.shape[-1])
        if isinstance(self.linear, nn.Linear):
            residual.addmm_(rows, self.linear.weight.t())
            if self.linear.bias is not None:
                residual += self.linear.bias
        else:
            self.linear.add_to(residual, rows)
        return residual


class FusedDecoderLayer(nn.Module):
    """A pre-norm layer that adds its attention and its MLP to the hidden state in place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        keep_plain_attributes(self, layer)
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mixer = _mixer(layer)
        setattr(self, self.mixer, _adding(getattr(layer, self.mixer), _MIXERS[self.mixer]))
        self.mlp = _adding(layer.mlp, "down_proj")

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """Run the layer on [1, T, hidden], in place; returns the same tensor."""
        residual = hidden_states[0]
        attended = self.input_layernorm(hidden_states)
        mixer = getattr(self, self.mixer)
        getattr(mixer, _MIXERS[self.mixer]).residual = residual
        mixer(hidden_states=attended, **options)
        gated = self.post_attention_layernorm(hidden_states)
        self.mlp.down_proj.residual = residual
        self.mlp(gated)
        return hidden_states


def _mixer(layer: nn.Module) -> str:
    """The name of a layer's module in which tokens see each other; "": it has none, or several."""
    parts = {name for name, _ in layer.named_children()} - _OTHER_PARTS
    return parts.pop() if len(parts) == 1 else ""


def _adding(module: nn.Module, name: str) -> Any:
    """Return a shallow copy of a module in which one linear layer adds to a residual."""
    other = copy.copy(module)
    other._modules = {**module._modules, name: AddLinear(getattr(module, name))}
    return other


def fuse_layers(model: nn.Module, layout: KVLayout) -> int:
    """Replace pre-norm layers by ones that add their products in place, if the model's results stay
    the same.

    Call it after modules are fused and before weights are packed.

    Returns:
        The number of replaced layers: all candidates, or none.
    """
    swaps = find_swaps(model, fused_layer)
    if not swaps:
        return 0
    probe = Probe(model, layout, PROBE_TOKENS)
    tolerance = LOGITS_TOLERANCE[next(model.parameters()).dtype]
    return len(swaps) if swap_verified(swaps, probe.logits, probe.logits(), tolerance) else 0


def find_swaps(model: nn.Module, make: Callable[[Any], nn.Module | None]) -> list[Swap]:
    """List the modules of a model for which ``make`` returns a replacement."""
    return [
        Swap(parent, name, made)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (made := make(child)) is not None
    ]


def fused_layer(layer: Any) -> FusedDecoderLayer | None:
    """Make a layer that adds in place from a module with such parts; None: it has others."""
    mixer = _mixer(layer)
    if mixer not in _MIXERS or not all(hasattr(layer, part) for part in _OTHER_PARTS):
        return None
    last = getattr(getattr(layer, mixer), _MIXERS[mixer], None)
    products = last, getattr(layer.mlp, "down_proj", None)
    return FusedDecoderLayer(layer) if all(map(is_plain, products)) else None
