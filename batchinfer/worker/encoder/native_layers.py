"""Runs all layers of a BERT-like encoder in one call to a C function on a CPU.

With torch, at MiniLM's width, attention, norms and activations take two fifths of an encoder's
time. Threads also wait for each other after each of these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation

from batchinfer.kernels.cpu.encoder_layers import (
    EncoderLayerArgs,
    LayerNormArgs,
    array_of_layers,
    encoder_layers,
    layer_norm_args,
    product_args,
    supports,
)
from batchinfer.worker.encoder.attention import current_runs
from batchinfer.worker.linear.packed_linear import PackedLinear, merged, packs
from batchinfer.worker.linear_kernels import LinearKernel
from batchinfer.worker.self_test import Swap, swap_verified

TOLERANCE = 0.05
"""Tolerance for hidden states: far above rounding errors, but far below the differences that arise
if texts in a packed row affect each other."""
_ACTIVATIONS: dict[type[nn.Module], str] = {
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
    NewGELUActivation: "gelu_tanh",
    nn.ReLU: "relu",
}


class _Parts(NamedTuple):
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    o: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    mlp_norm: nn.LayerNorm
    num_heads: int
    scale: float
    activation: nn.Module


class NativeEncoderLayers(nn.Module):
    """Runs all layers of an encoder in one call.

    Args:
        parts: modules and settings of each layer. All layers have the same shapes and settings.
    """

    def __init__(self, parts: Sequence[_Parts], kernel: LinearKernel) -> None:
        super().__init__()
        first = parts[0]
        self._num_heads, self._scale = first.num_heads, first.scale
        self._activation = _ACTIVATIONS[type(first.activation)]
        self._width = 3 * first.qkv[0].out_features
        self.linears = nn.ModuleList()
        self.norms = nn.ModuleList()
        self._layers = array_of_layers([self._arguments(layer, kernel) for layer in parts])
        self._qkv = torch.empty(0)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, width]
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Run the layers on [1, T, width], in place if ``hidden_states`` is contiguous."""
        hidden_states = hidden_states.contiguous()
        hidden = hidden_states[0]
        lengths = [length for _, count, length in current_runs() for _ in range(count)]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        encoder_layers(
            *(self._layers, hidden, self._qkv_buffer(hidden), starts),
            num_heads=self._num_heads,
            activation=self._activation,
            scale=self._scale,
        )
        return hidden_states

    def _qkv_buffer(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized buffer [T or more, 3 * width], reused by later steps."""
        if len(self._qkv) < len(hidden):
            self._qkv = torch.empty(0)  # free the old buffer first; memory may not hold both
            self._qkv = hidden.new_empty(len(hidden), self._width)
        return self._qkv

    def _arguments(self, parts: _Parts, kernel: LinearKernel) -> EncoderLayerArgs:
        linears = merged(*parts.qkv), parts.o, parts.up, parts.down
        qkv, o, up, down = (PackedLinear(linear, kernel) for linear in linears)
        self.linears.extend((qkv, o, up, down))
        self.norms.extend((parts.attention_norm, parts.mlp_norm))
        return EncoderLayerArgs(
            _linear_args(qkv),
            _linear_args(o, adds=True),
            _norm(parts.attention_norm),
            _linear_args(up),
            _linear_args(down, adds=True),
            _norm(parts.mlp_norm),
        )


def join_encoder_layers(
    body: nn.Module,
    kernel: LinearKernel,
    dtype: torch.dtype,
    states: Callable[[], torch.Tensor],
) -> bool:
    """Replace an encoder's layers with ``NativeEncoderLayers`` if its hidden states stay the same.

    Args:
        states: runs the body and returns hidden states [T, H].

    Returns:
        True if the layers were replaced.
    """
    if kernel.kind != "own" or not supports(dtype):
        return False
    swaps = [
        Swap(parent, name, nn.ModuleList([NativeEncoderLayers(parts, kernel)]))
        for parent in body.modules()
        for name, child in parent.named_children()
        if (parts := _parts_of_all(child, kernel, dtype))
    ]
    return bool(swaps) and swap_verified(swaps, states, states(), TOLERANCE)


def _parts_of_all(child: nn.Module, kernel: LinearKernel, dtype: torch.dtype) -> list[_Parts]:
    """Return the parts of each layer, or an empty list if some layers are not like BERT's or differ
    in shape."""
    if not isinstance(child, nn.ModuleList):
        return []
    candidates = [_parts(layer) for layer in child]
    parts = [p for p in candidates if p is not None and _fits(p, kernel, dtype)]
    shapes = {
        (p.num_heads, p.scale, type(p.activation), p.qkv[0].weight.shape, p.up.weight.shape)
        for p in parts
    }
    return parts if len(parts) == len(child) and len(shapes) == 1 else []


def _parts(layer: Any) -> _Parts | None:
    """Return the parts of a layer of BERT, DistilBERT or a family derived from BERT; None for other
    layers."""
    try:
        if hasattr(layer, "ffn"):
            attention, mlp = layer.attention, layer.ffn
            return _Parts(
                (attention.q_lin, attention.k_lin, attention.v_lin),
                attention.out_lin,
                layer.sa_layer_norm,
                mlp.lin1,
                mlp.lin2,
                layer.output_layer_norm,
                attention.n_heads,
                attention.scaling,
                mlp.activation,
            )
        attention, output = layer.attention.self, layer.attention.output
        return _Parts(
            (attention.query, attention.key, attention.value),
            output.dense,
            output.LayerNorm,
            layer.intermediate.dense,
            layer.output.dense,
            layer.output.LayerNorm,
            attention.num_attention_heads,
            attention.scaling,
            layer.intermediate.intermediate_act_fn,
        )
    except AttributeError:
        return None


def _fits(parts: _Parts, kernel: LinearKernel, dtype: torch.dtype) -> bool:
    norms = parts.attention_norm, parts.mlp_norm
    linears = *parts.qkv, parts.o, parts.up, parts.down
    return (
        type(parts.activation) in _ACTIVATIONS
        and all(packs(linear, kernel, dtype) for linear in linears)
        and len({linear.out_features for linear in parts.qkv}) == 1
        and all(
            type(norm) is nn.LayerNorm
            and norm.bias is not None
            and norm.weight.dtype == norm.bias.dtype == dtype
            for norm in norms
        )
    )


def _linear_args(linear: PackedLinear, *, adds: bool = False) -> Any:
    native = linear.native
    assert native is not None
    widths = linear.in_features, linear.out_features
    return product_args(native.weight, linear.bias, *widths, adds=adds)


def _norm(norm: nn.LayerNorm) -> LayerNormArgs:
    return layer_norm_args(norm.weight, norm.bias, norm.eps)
