"""Runs transformers' Gated DeltaNet and Kimi Delta Attention layers on packed rows, with their
state in the KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from batchinfer.kernels import gated_delta as reference
from batchinfer.kernels import recurrence
from batchinfer.kernels.cpu import gated_delta as native
from batchinfer.kernels.gated_delta import GatedDeltaWeights
from batchinfer.worker.recurrent.paged_states import choose_kernel, paged_states


class LayerInputs(NamedTuple):
    """Outputs of a layer's input projections for T packed tokens."""

    qkv: torch.Tensor
    """[T, channels] queries and keys of all key heads, then values, before the convolution."""
    gate: torch.Tensor
    """[T, Hv * Dv] gate of the output."""
    decay: torch.Tensor
    """[T, Hv * decay_width] inputs of the decay's formula."""
    beta: torch.Tensor
    """[T, Hv] logits of the write strength."""


@dataclass(frozen=True)
class Family:
    """Names of the parts of a Gated DeltaNet layer in one of transformers' families. A part inside
    a submodule has a dotted name."""

    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """Projections that compute queries, keys and values, in this order."""
    gate: str = "in_proj_z"
    decay: str = "in_proj_a"
    beta: str = "in_proj_b"
    output: str = "out_proj"
    norm: str = "norm"
    key_heads: str = "num_k_heads"
    key_width: str = "head_k_dim"
    second_gate: str = ""
    """Projection of the output of ``gate``; empty: none."""
    second_decay: str = ""
    """Projection of the output of ``decay``; empty: none."""
    decay_module: str = ""
    """Submodule with the constants of the decay; empty: the layer itself."""
    by_key_head: bool = False
    """True if two projections compute all inputs, and order their outputs by key head."""

    @property
    def projections(self) -> tuple[str, ...]:
        """Projections of the layer's input, in the order of ``LayerInputs``."""
        return (*self.qkv, self.gate, self.decay, self.beta)

    @property
    def second_projections(self) -> tuple[str, ...]:
        return tuple(name for name in (self.second_gate, self.second_decay) if name)

    def projected_again(self, module: Any, inputs: LayerInputs) -> LayerInputs:
        """Apply the second projections to the outputs of ``projections``."""
        gate, decay = inputs.gate, inputs.decay
        if self.second_gate:
            gate = module.get_submodule(self.second_gate)(gate)
        if self.second_decay:
            decay = module.get_submodule(self.second_decay)(decay)
        return inputs._replace(gate=gate, decay=decay)

    def inputs(self, module: Any, hidden: torch.Tensor) -> LayerInputs:
        """Apply the input projections to packed hidden states [T, H]."""
        if self.by_key_head:
            parts = module.fix_query_key_value_ordering(
                module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
            )
            # With one value head per key head, transformers returns strided `beta` and `decay`.
            query, key, value, gate, beta, decay = (
                part[0].flatten(1).contiguous() for part in parts
            )
            return LayerInputs(torch.cat([query, key, value], dim=1), gate, decay, beta)
        *qkv, gate, decay, beta = (module.get_submodule(name)(hidden) for name in self.projections)
        channels = qkv[0] if len(qkv) == 1 else torch.cat(qkv, dim=1)
        return self.projected_again(module, LayerInputs(channels, gate, decay, beta))


_QWEN3_5 = Family()
FAMILIES = {
    "KimiLinearDeltaAttention": Family(
        qkv=("q_proj", "k_proj", "v_proj"),
        gate="g_a_proj",
        decay="forget_gate.f_a_proj",
        beta="b_proj",
        output="o_proj",
        norm="o_norm",
        key_heads="num_heads",
        key_width="head_dim",
        second_gate="g_b_proj",
        second_decay="forget_gate.f_b_proj",
        decay_module="forget_gate",
    ),
    "OlmoHybridGatedDeltaNet": Family(
        ("q_proj", "k_proj", "v_proj"), "g_proj", "a_proj", "b_proj", "o_proj", "o_norm"
    ),
    "Qwen3NextGatedDeltaNet": Family(by_key_head=True),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
}
"""Families, keyed by the name of their layers' class in transformers."""


def forward(self: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run the layer on [1, T, H] in place of transformers' ``forward``, and return [1, T, H]."""
    family = FAMILIES[type(self).__name__]
    if (weights := getattr(self, "_paged_weights", None)) is None:
        weights = self._paged_weights = weights_of(self, family)
    inputs = family.inputs(self, hidden_states[0])
    output: torch.Tensor = getattr(self, family.output)(run_layer(inputs, weights, self.layer_idx))
    return output[None]


def run_layer(inputs: LayerInputs, weights: GatedDeltaWeights, layer: int) -> torch.Tensor:
    """Run the part of a layer between its projections, and return [T, Hv * Dv]. ``layer`` is the
    layer's number in the model."""
    out = torch.empty(inputs.gate.shape, dtype=inputs.gate.dtype, device=inputs.gate.device)
    compute = choose_kernel(
        out,
        len(weights.conv),
        triton=recurrence.gated_delta,
        native=native.gated_delta,
        reference=reference.gated_delta,
    )
    states = paged_states(layer, has_scan=True)
    compute(*inputs, weights=weights, states=states, out=out)
    return out


def weights_of(layer: Any, family: Family) -> GatedDeltaWeights:
    """Return the weights of transformers' layer, without projections."""
    norm, decay = getattr(layer, family.norm), layer.get_submodule(family.decay_module)
    return GatedDeltaWeights(
        conv=layer.conv1d.weight[:, 0].T.float().contiguous(),
        decay_rate=decay.A_log.float().exp().flatten(),
        dt_bias=decay.dt_bias.float().contiguous(),
        norm=norm.weight.float().contiguous(),
        norm_eps=norm.variance_epsilon,
        max_beta=2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0,
        num_key_heads=getattr(layer, family.key_heads),
        key_width=getattr(layer, family.key_width),
        with_silu=getattr(norm, "activation", "silu") != "sigmoid",
    )
