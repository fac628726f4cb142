"""Runs transformers' short convolutions on packed rows, with their state in the KV pool."""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.kernels import causal_conv as reference
from batchinfer.kernels import recurrent_conv
from batchinfer.kernels.causal_conv import CausalConvWeights
from batchinfer.kernels.cpu import causal_conv as native
from batchinfer.worker.recurrent.paged_states import choose_kernel, paged_states

LAYERS = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")


def forward(self: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run the layer on [1, T, H] in place of transformers' ``forward``, and return [1, T, H]."""
    if (weights := getattr(self, "_paged_weights", None)) is None:
        weights = self._paged_weights = weights_of(self.conv, silu=False)
    before, after, values = self.in_proj(hidden_states[0]).chunk(3, dim=1)
    convolved = convolve(values, weights, self.layer_idx, before=before, after=after)
    output: torch.Tensor = self.out_proj(convolved)
    return output[None]


def convolve(
    inputs: torch.Tensor,
    weights: CausalConvWeights,
    layer: int,
    *,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the causal convolution of a step's tokens.

    Args:
        inputs: [T, channels].
        before: [T, channels] factors by which the inputs are multiplied, or None.
        after: [T, channels] factors by which the outputs are multiplied, or None.
    """
    out = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    compute = choose_kernel(
        out,
        len(weights.conv),
        triton=recurrent_conv.causal_conv,
        native=native.causal_conv,
        reference=reference.causal_conv,
    )
    compute(inputs, before, after, weights=weights, states=paged_states(layer), out=out)
    return out


def weights_of(conv: torch.nn.Conv1d, *, silu: bool) -> CausalConvWeights:
    return CausalConvWeights(
        conv=conv.weight[:, 0].T.float().contiguous(),
        bias=None if conv.bias is None else conv.bias.float().contiguous(),
        silu=silu,
    )
