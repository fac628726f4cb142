"""Runs transformers' Mamba-1 layers on packed rows, with their state in the KV pool."""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.kernels import mamba1 as reference
from batchinfer.kernels import recurrence
from batchinfer.kernels.cpu import mamba1 as native
from batchinfer.kernels.mamba1 import Mamba1Weights
from batchinfer.worker.recurrent import short_conv
from batchinfer.worker.recurrent.paged_states import choose_kernel, paged_states

LAYERS = ("FalconMambaMixer", "JambaMambaMixer", "MambaMixer")
"""Names of transformers' classes. Some classes have norms after ``x_proj``."""


def forward(self: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run the layer on [1, T, H] in place of transformers' ``forward``, and return [1, T, H]."""
    if getattr(self, "_paged_weights", None) is None:
        self._paged_weights = short_conv.weights_of(self.conv1d, silu=True), weights_of(self)
    conv, weights = self._paged_weights
    values, gate = self.in_proj(hidden_states[0]).chunk(2, dim=1)
    values = short_conv.convolve(values, conv, self.layer_idx)
    dt, write, read = self.x_proj(values).split(
        [self.time_step_rank, self.ssm_state_size, self.ssm_state_size], dim=1
    )
    if hasattr(self, "dt_layernorm"):
        dt, write, read = self.dt_layernorm(dt), self.b_layernorm(write), self.c_layernorm(read)
    out = torch.empty_like(values)
    compute = choose_kernel(
        out,
        len(conv.conv),
        triton=recurrence.mamba1,
        native=native.mamba1,
        reference=reference.mamba1,
    )
    inputs = values, self.dt_proj(dt), write, read, gate
    compute(*inputs, weights=weights, states=paged_states(self.layer_idx), out=out)
    output: torch.Tensor = self.out_proj(out)
    return output[None]


def weights_of(layer: Any) -> Mamba1Weights:
    """Return the weights that the scan in transformers' layer uses."""
    return Mamba1Weights(
        decay_rate=layer.A_log.float().exp().T.contiguous(),
        skip=layer.D.float().contiguous(),
    )
