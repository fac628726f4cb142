"""Runs decoder layers with Gated DeltaNet in C on a CPU, with one call for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.kernels.cpu import gated_delta
from batchinfer.kernels.cpu.delta_layer import DeltaLayerArgs, DeltaStepArgs, delta_layer
from batchinfer.kernels.cpu.recurrent_state import supports
from batchinfer.worker.attention.attention import ForwardContext, current_context
from batchinfer.worker.fusion.fused_modules import PROBE_TOKENS, FusedDecoderLayer
from batchinfer.worker.fusion.gated_delta_net import FusedGatedDeltaNet
from batchinfer.worker.fusion.native_layers import (
    NativeLayers,
    Workspace,
    linear_args,
    mlp_args,
    norm_args,
    parts_fit,
)
from batchinfer.worker.recurrent.paged_states import paged_states
from batchinfer.worker.self_test import Probe, find_swaps, swap_verified


class NativeDeltaLayer(NativeLayers):
    """Runs a layer in one call to C, while a Python layer needs many calls.

    The results have the same bits as the Python layer's results. The Python layer still runs in
    steps with adapters.

    Args:
        layer: a ``FusedDecoderLayer`` with a ``FusedGatedDeltaNet`` and packed weights.
        workspace: buffers that all layers of a model share.
        floats: float32 buffers that all layers share.
    """

    def __init__(self, layer: Any, workspace: Workspace, floats: Workspace) -> None:
        super().__init__([layer], workspace)
        self._floats = floats
        self._step = DeltaStepArgs()
        self._arguments = DeltaLayerArgs()
        self._made_for: tuple[object, ...] = ()

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden], contiguous
        **options: Any,
    ) -> torch.Tensor:
        """Run the layer in place, and return ``hidden_states``."""
        context = current_context()
        if context.adapters is not None:
            return self.run_in_python(hidden_states, **options)
        hidden, buffers = hidden_states[0], (self.workspace, self._floats)
        for each in buffers:
            each.reserve(len(hidden))
        made_for = context.cache, *(each.generation for each in buffers)
        if made_for != self._made_for:
            try:
                self._make_arguments(hidden, context)
            except (MemoryError, RuntimeError):
                for each in buffers:
                    each.release()  # free memory for the smaller step that follows
                raise
            self._made_for = made_for
        step, tensors = self._step, context.tensors
        step.hidden, step.tables = hidden.data_ptr(), tensors["state_tables"].data_ptr()
        step.query_starts = tensors["query_starts"].data_ptr()
        step.context_lens = tensors["context_lens"].data_ptr()
        step.num_sequences, step.table_width = tensors["state_tables"].shape
        step.num_tokens, step.num_threads = len(hidden), torch.get_num_threads()
        delta_layer(self._arguments, step, hidden.dtype)
        return hidden_states

    def _make_arguments(self, hidden: torch.Tensor, context: ForwardContext) -> None:
        """Make the C arguments that stay the same for all steps over this pool and workspace.
        ``DeltaStepArgs`` holds the others."""
        layer: Any = self.layers[0]
        mixer, workspace = layer.linear_attn, self.workspace
        last = getattr(mixer, mixer.output).linear
        hidden = hidden.as_strided(hidden.shape, (hidden.shape[1], 1))
        normed = workspace.take_padded("normed", hidden.shape[1])
        projected = workspace.take("projected", mixer.in_proj.out_features)
        mixed = workspace.take_padded("mixed", last.in_features)
        inputs = projected.split_with_sizes(mixer.widths, dim=1)
        widths = gated_delta.workspace_widths(mixer.widths[0], mixer.weights)
        self._arguments = DeltaLayerArgs(
            norm_args(layer.input_layernorm, hidden, normed),
            linear_args(mixer.in_proj, normed, projected),
            gated_delta.gated_delta_args(
                *inputs,
                weights=mixer.weights,
                states=paged_states(mixer.layer),
                out=mixed,
                buffers=[self._floats.take(f"{at}", width) for at, width in enumerate(widths)],
            ),
            linear_args(last, mixed, hidden, adds=True),
            *mlp_args(layer, hidden, normed, workspace),
        )


@torch.inference_mode()
def fuse_native_delta_layers(model: nn.Module, layout: KVLayout) -> None:
    """Replace each fused layer that has a Gated DeltaNet with a native layer, if the results' bits
    stay the same. Call this after ``fuse`` and ``pack_linears``."""
    dtype = next(model.parameters()).dtype
    workspace, floats = Workspace(dtype), Workspace(torch.float32)

    def make(layer: Any) -> nn.Module | None:
        return NativeDeltaLayer(layer, workspace, floats) if _fits(layer, dtype) else None

    if swaps := find_swaps(model, make):
        probe = Probe(model, layout, PROBE_TOKENS)
        swap_verified(swaps, probe.logits, probe.logits(), 0.0)


def _fits(layer: Any, dtype: torch.dtype) -> bool:
    mixer = getattr(layer, "linear_attn", None)
    if type(layer) is not FusedDecoderLayer or type(mixer) is not FusedGatedDeltaNet:
        return False
    if mixer.projects_twice or not supports(dtype, len(mixer.weights.conv)):
        return False
    return parts_fit(layer, (mixer.in_proj, getattr(mixer, mixer.output).linear), dtype)
