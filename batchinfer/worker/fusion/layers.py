"""Adds a decoder layer's two products onto the residual where they are computed.

A layer of the Llama shape ends its attention and its MLP with ``residual + x @ weight.T``. A matrix
product that adds to what its output holds costs nothing more, and saves a pass over the hidden
state that reads two and writes one: two launches less a layer. Norms then read the sum as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.fusion.modules import keep_plain_attributes
from batchinfer.worker.linear.fp8 import Fp8Linear
from batchinfer.worker.linear.packed_linear import PackedLinear, pack_linears
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.model.quantization import is_plain
from batchinfer.worker.probe import ModuleCall, Probe, record_calls

_TOKENS = (3, 7, 5, 3)
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# Largest difference over the largest value: the sum is rounded once less.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_OF_ROUNDED_ROWS = 4
"""Times as large where products round their rows to int8: a last bit can be a code more or less,
2e-2 to 3e-2 in some layer of most models."""


class AddLinear(nn.Module):
    """Adds ``x @ weight.T`` to ``residual``, which the caller sets before."""

    def __init__(self, linear: nn.Linear | Fp8Linear) -> None:
        super().__init__()
        self.linear = linear
        self.residual: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the product of x [..., in_features] to the residual [T, out_features]."""
        residual, self.residual = self.residual, None
        assert residual is not None
        rows = x.reshape(-1, x.shape[-1])
        if isinstance(self.linear, Fp8Linear):
            self.linear.add_to(residual, rows)
            return residual
        return residual.addmm_(rows, self.linear.weight.t())


class AddPackedLinear(nn.Module):
    """Adds ``x @ weight.T`` of a packed weight to ``residual``, which the caller sets before."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.linear = linear
        self.residual: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the product of x [..., in_features] to the residual [T, out_features]."""
        residual, self.residual = self.residual, None
        assert residual is not None
        return self.linear.add_to(residual, x)


def pack_products(model: nn.Module, kernel: LinearKernel, dtype: torch.dtype) -> None:
    """Have a kernel multiply in a model's linear layers, and in those that add their products.

    Args:
        kernel: one of the project's own.
        dtype: of the weights.
    """
    pack_linears(model, kernel, dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            linear: Any = child.linear if isinstance(child, AddLinear) else None
            if isinstance(linear, PackedLinear):
                setattr(parent, name, AddPackedLinear(linear))


class FusedDecoderLayer(nn.Module):
    """A pre-norm layer that adds its attention and its MLP to the hidden state in place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        keep_plain_attributes(self, layer)
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        attention, mlp = layer.self_attn, layer.mlp
        self.self_attn = _with_part(attention, "o_proj", _adding(attention.o_proj))
        self.mlp = _with_part(mlp, "down_proj", _adding(mlp.down_proj))

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """Run the layer on [1, T, hidden], which is changed, and returned."""
        residual = hidden_states[0]
        attended = self.input_layernorm(hidden_states)
        self.self_attn.o_proj.residual = residual
        self.self_attn(hidden_states=attended, **options)
        gated = self.post_attention_layernorm(hidden_states)
        self.mlp.down_proj.residual = residual
        self.mlp(gated)
        return hidden_states


def fuse_layers(model: nn.Module, layout: KVLayout) -> int:
    """Swap layers for ones that add their products in place, where those compute the same.

    Call it after ``fuse``, and where linear layers keep their weights as they are (not packed).

    Returns:
        The number of layers swapped.
    """
    return swap_layers(model, layout, _with_sums_in_place)


def swap_layers(model: nn.Module, layout: KVLayout, make: Callable[[Any], nn.Module | None]) -> int:
    """Swap pre-norm layers for what ``make`` makes of them, where that computes the same.

    Args:
        make: what may take a layer's place, and leaves the layer as it is; None where nothing may.

    Returns:
        The number of layers swapped.
    """
    probe, count = Probe(model, layout, _TOKENS), 0
    with record_calls(filter(_is_pre_norm_layer, model.modules()), clone=True) as calls:
        probe.logits()
    recorded = {call.module: call for call in calls}
    with torch.inference_mode(), probe.in_forward():
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                swapped = make(layer) if layer in recorded else None
                if swapped is not None and _computes_the_same(swapped, recorded[layer]):
                    setattr(parent, name, swapped)
                    count += 1
    return count


def _is_pre_norm_layer(module: Any) -> bool:
    return {name for name, _ in module.named_children()} == _PARTS


def _computes_the_same(swapped: nn.Module, call: ModuleCall) -> bool:
    output = call.output
    if len(call.arguments) != 1 or not isinstance(output, torch.Tensor):
        return False
    try:
        hidden = call.arguments[0].clone()  # to be changed in place
        difference = (swapped(hidden, **call.options) - output).float().abs().max()
    except (AssertionError, RuntimeError, TypeError):
        return False  # the layer's parts are called in another way
    rounds = any(isinstance(m, PackedLinear) and m.is_low_bit for m in call.module.modules())
    tolerance = _TOLERANCE[output.dtype] * (_OF_ROUNDED_ROWS if rounds else 1)
    return bool(difference <= tolerance * output.float().abs().max())


def _with_sums_in_place(layer: Any) -> nn.Module | None:
    products = (getattr(layer.self_attn, "o_proj", None), getattr(layer.mlp, "down_proj", None))
    if not all(is_plain(product) and product.bias is None for product in products):
        return None
    return FusedDecoderLayer(layer)


def _adding(linear: Any) -> nn.Module:
    return AddPackedLinear(linear) if isinstance(linear, PackedLinear) else AddLinear(linear)


def _with_part(module: nn.Module, name: str, part: nn.Module) -> Any:
    """A shallow copy of a module with one part exchanged."""
    other = copy.copy(module)
    other._modules = {**module._modules, name: part}
    return other
