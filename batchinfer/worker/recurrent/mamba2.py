"""Runs transformers' Mamba-2 layers on packed rows, with their state in the KV pool."""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.kernels import mamba2 as reference
from batchinfer.kernels import recurrence
from batchinfer.kernels.cpu import mamba2 as native
from batchinfer.kernels.mamba2 import Mamba2Weights
from batchinfer.worker.recurrent.paged_states import choose_kernel, paged_states

LAYERS = (
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "Mamba2Mixer",
    "NemotronHMamba2Mixer",
    "Zamba2MambaMixer",
)
"""Names of transformers' classes, which differ only in optional parts."""


def forward(self: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run the layer on [1, T, H] in place of transformers' ``forward``, and return [1, T, H]."""
    if (weights := getattr(self, "_paged_weights", None)) is None:
        weights = self._paged_weights = weights_of(self)
    scales = getattr(self, "mup_vector", None)  # Falcon-H1 scales inputs and outputs
    if scales is not None:
        hidden_states = hidden_states * self.ssm_in_multiplier
    projected = self.in_proj(hidden_states[0])
    if scales is not None:
        projected = projected * scales[0]
    gate, values, dt = projected.split(
        [self.intermediate_size, self.conv_dim, self.num_heads], dim=1
    )
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    compute = choose_kernel(
        out,
        len(weights.conv),
        triton=recurrence.mamba2,
        native=native.mamba2,
        reference=reference.mamba2,
    )
    # The chunked scan rounds products of B and C to the model's dtype. In float16,
    # these products could overflow.
    states = paged_states(self.layer_idx, has_scan=out.dtype != torch.float16)
    compute(values, gate, dt, weights=weights, states=states, out=out)
    output: torch.Tensor = self.out_proj(out)
    return output[None]


def weights_of(layer: Any) -> Mamba2Weights:
    """Return the weights of transformers' layer, without projections."""
    norm = layer.norm if hasattr(layer.norm, "weight") else None
    bias = layer.conv1d.bias
    low, high = layer.time_step_limit
    return Mamba2Weights(
        conv=layer.conv1d.weight[:, 0].T.float().contiguous(),
        conv_bias=None if bias is None else bias.float().contiguous(),
        decay_rate=layer.A_log.float().exp(),
        dt_bias=layer.dt_bias.float().contiguous(),
        skip=layer.D.float().contiguous(),
        norm=None if norm is None else norm.weight.float().contiguous(),
        norm_eps=0.0 if norm is None else norm.variance_epsilon,
        norm_width=layer.intermediate_size // layer.n_groups,
        gate_first=norm is not None and not getattr(norm, "norm_before_gate", False),
        num_groups=layer.n_groups,
        state_size=layer.ssm_state_size,
        dt_limits=(float(low), float(high)),
    )
