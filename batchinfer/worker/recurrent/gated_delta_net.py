"""Runs transformers' Gated DeltaNet layers on packed rows, with their state in the KV pool.

transformers' own forward pass ignores where sequences begin in a packed row. Only that method is
replaced: the layer keeps its projections, which other code quantizes, packs and adapts.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from batchinfer.engine.kv.state_layout import StateLayout
from batchinfer.kernels.cpu import gated_delta as native
from batchinfer.kernels.gated_delta import GatedDeltaWeights, StatePlaces, gated_delta
from batchinfer.worker.attention.attention import current_context


class LayerInputs(NamedTuple):
    """Projections of T packed tokens."""

    qkv: torch.Tensor
    """[T, channels] queries and keys of all key heads, then values, before the convolution."""
    gate: torch.Tensor
    """[T, Hv * Dv] gate of the output."""
    decay: torch.Tensor
    """[T, Hv] input of the decay."""
    beta: torch.Tensor
    """[T, Hv] logit of the writing strength."""


class _Family(Protocol):
    """Names of the parts of a family's layer."""

    output: str
    norm: str

    def inputs(self, module: Any, hidden: torch.Tensor) -> LayerInputs:
        """Project packed hidden states [T, H]."""
        ...


class _Qwen35:
    output, norm = "out_proj", "norm"

    def inputs(self, module: Any, hidden: torch.Tensor) -> LayerInputs:
        return LayerInputs(
            module.in_proj_qkv(hidden),
            module.in_proj_z(hidden),
            module.in_proj_a(hidden),
            module.in_proj_b(hidden),
        )


class _Qwen3Next:
    output, norm = "out_proj", "norm"

    def inputs(self, module: Any, hidden: torch.Tensor) -> LayerInputs:
        parts = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
        )
        query, key, value, gate, beta, decay = (part[0].flatten(1) for part in parts)
        return LayerInputs(torch.cat([query, key, value], dim=1), gate, decay, beta)


class _OlmoHybrid:
    output, norm = "o_proj", "o_norm"

    def inputs(self, module: Any, hidden: torch.Tensor) -> LayerInputs:
        qkv = [module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)]
        return LayerInputs(
            torch.cat(qkv, dim=1),
            module.g_proj(hidden),
            module.a_proj(hidden),
            module.b_proj(hidden),
        )


_FAMILIES: dict[str, _Family] = {
    "OlmoHybridGatedDeltaNet": _OlmoHybrid(),
    "Qwen3NextGatedDeltaNet": _Qwen3Next(),
    "Qwen3_5GatedDeltaNet": _Qwen35(),
    "Qwen3_5MoeGatedDeltaNet": _Qwen35(),
}
"""By the name of transformers' class."""


def page_recurrent_state(model: nn.Module) -> None:
    """Let a model's recurrent layers keep their state in the pool of the forward context."""
    for module in model.modules():
        if type(module).__name__ in _FAMILIES:
            module.forward = MethodType(_forward, module)


def _forward(self: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Replaces the layer's own forward pass; takes and returns [1, T, H]."""
    family, context = _FAMILIES[type(self).__name__], current_context()
    inputs = family.inputs(self, hidden_states[0])
    layout = context.cache.layout.state
    assert layout is not None
    out = torch.empty_like(inputs.gate)
    compute = native.gated_delta if native.supports(out.dtype) else gated_delta
    compute(
        *inputs,
        weights=_weights(self, family),
        states=context.cache.states,
        places=places_of(layout, layout.layers.index(self.layer_idx)),
        state_tables=context.tensors["state_tables"],
        query_starts=context.tensors["query_starts"],
        context_lens=context.tensors["context_lens"],
        out=out,
    )
    output: torch.Tensor = getattr(self, family.output)(out)
    return output[None]


def _weights(module: Any, family: _Family) -> GatedDeltaWeights:
    """The weights of a layer, kept with the layer after the first call."""
    kept: GatedDeltaWeights | None = getattr(module, "_paged_weights", None)
    if kept is None:
        norm = getattr(module, family.norm)
        kept = GatedDeltaWeights(
            conv=module.conv1d.weight[:, 0].T.float().contiguous(),
            decay_rate=module.A_log.float().exp(),
            dt_bias=module.dt_bias.float().contiguous(),
            norm=norm.weight.float().contiguous(),
            norm_eps=norm.variance_epsilon,
            max_beta=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
            num_key_heads=module.num_k_heads,
            key_width=module.head_k_dim,
        )
        module._paged_weights = kept
    return kept


@functools.cache
def places_of(layout: StateLayout, number: int) -> StatePlaces:
    """The place of the state of recurrent layer ``number``."""
    shape, matrices, convolutions = layout.shape, layout.matrices, layout.convolutions
    return StatePlaces(
        columns=matrices.piece_elements // shape.key_width,
        per_slot=matrices.per_slot(layout.slot_bytes),
        first=number * matrices.num_pieces,
        channels=convolutions.piece_elements // (shape.conv_width - 1),
        conv_per_slot=convolutions.per_slot(layout.slot_bytes),
        conv_first=number * convolutions.num_pieces,
        conv_slot=layout.first_conv_slot,
    )
