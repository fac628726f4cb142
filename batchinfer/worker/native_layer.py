"""Decoder layers that run as one call of a C function, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.engine.layout import KVLayout
from batchinfer.kernels.cpu import gemm, row_ops
from batchinfer.kernels.cpu.decoder_layer import LayerArgs, StepArgs, decoder_layer, supports
from batchinfer.worker.attention import ForwardContext, current_context
from batchinfer.worker.fused_layers import swap_layers
from batchinfer.worker.fused_modules import (
    FusedAttention,
    FusedGatedMLP,
    FusedRMSNorm,
    keep_plain_attributes,
)
from batchinfer.worker.linear import PackedLinear
from batchinfer.worker.native_attention import NativeAttention
from batchinfer.worker.row_ops import head_norm_options


class NativeDecoderLayer(nn.Module):
    """A pre-norm layer, one call: without it, Python takes a tenth of a decode step.

    Every number is computed as in the layer it was made of, but that the two products are added
    to the hidden state before they are rounded. Over a pool that the C kernels do not read (of
    float8) that layer runs itself.

    Args:
        layer: made of fused modules, its products with packed weights.
        workspace: shared by the layers of a model.
    """

    def __init__(self, layer: Any, workspace: Workspace) -> None:
        super().__init__()
        keep_plain_attributes(self, layer)
        self.layer = layer
        self._workspace = workspace
        self._arguments = LayerArgs()
        self._made_for: tuple[object, ...] = ()

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden], contiguous
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin [1, T, rotary width]
        **options: Any,
    ) -> torch.Tensor:
        """[1, T, hidden], in the memory of ``hidden_states``."""
        context = current_context()
        if not isinstance(context.backend, NativeAttention):
            options["position_embeddings"] = position_embeddings
            out: torch.Tensor = self.layer(hidden_states, **options)
            return out
        workspace = self._workspace
        step = workspace.step_of(context, position_embeddings, self.layer.self_attn.layer)
        made_for = context.cache, workspace.generation
        if made_for != self._made_for:
            try:
                self._arguments = self._make_arguments(hidden_states[0], context)
            except (MemoryError, RuntimeError):
                workspace.release()  # a smaller step must not ask for as much again
                raise
            self._made_for = made_for
        step.hidden = hidden_states.data_ptr()
        decoder_layer(self._arguments, step, hidden_states.dtype)
        return hidden_states

    def _make_arguments(self, hidden: torch.Tensor, context: ForwardContext) -> LayerArgs:
        """For every step over this pool and workspace; what differs is in ``StepArgs``.

        Of whole buffers: of one row torch tells no stride that rows of a longer step lie at, and
        a step with more rows than a buffer has makes another.
        """
        layer, cache, backend = self.layer, context.cache, context.backend
        assert isinstance(backend, NativeAttention)
        attention, mlp = layer.self_attn, layer.mlp
        width, workspace = cache.layout.key_width, self._workspace
        hidden = hidden.as_strided(hidden.shape, (hidden.shape[1], 1))  # of one row it may be any
        normed = workspace.take_factor("normed", hidden.shape[1])
        qkv = workspace.take("qkv", attention.qkv_proj.out_features)
        attended = workspace.take_factor("attended", attention.o_proj.in_features)
        gate_up = workspace.take("gate_up", mlp.gate_up_proj.out_features)
        gated = workspace.take_factor("gated", mlp.down_proj.in_features)
        query = qkv[:, : attended.shape[1]].view(len(qkv), -1, width)
        return LayerArgs(
            _norm(layer.input_layernorm, hidden, normed),
            _product(attention.qkv_proj, normed, qkv),
            row_ops.rotary_write_args(
                *(qkv, *workspace.rotary, cache.key(attention.layer), cache.value(attention.layer)),
                context.slot_mapping(attention.layer),
                **head_norm_options(attention.head_norms()),
            ),
            backend.arguments(
                *(attention.layer, query, attention.variant),
                out=attended.view(len(qkv), -1, width),
            ),
            _product(attention.o_proj, attended, hidden, adds=True),
            _norm(layer.post_attention_layernorm, hidden, normed),
            _product(mlp.gate_up_proj, normed, gate_up),
            row_ops.silu_mul_args(gate_up, out=gated),
            _product(mlp.down_proj, gated, hidden, adds=True),
        )


class Workspace:
    """What layers compute on the way, in memory that the next layer and step use again.

    Args:
        dtype: of all of it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.generation = 0
        """Where it stays the same, so does the memory."""
        self._num_rows = 0  # tokens there is room for
        self._empty = torch.empty(0, dtype=dtype)
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self.rotary = self._empty, self._empty
        """Cosines and sines of the step, [T, rotary width]."""
        self._of: tuple[object, object] = None, None  # what the steps were made of
        self._steps: dict[int, StepArgs] = {}  # by layer group

    def step_of(
        self,
        context: ForwardContext,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        layer: int,
    ) -> StepArgs:
        """What layers are called with in this step, made once for all; there is room for it."""
        if self._of[0] is not context or self._of[1] is not position_embeddings:
            cos, sin = position_embeddings
            self.rotary = cos[0].contiguous(), sin[0].contiguous()
            self.reserve(len(self.rotary[0]))
            self._steps.clear()
            self._of = context, position_embeddings
        group = context.cache.group(layer)
        if group not in self._steps:
            self._steps[group] = self._make_step(context, layer, group)
        return self._steps[group]

    def _make_step(self, context: ForwardContext, layer: int, group: int) -> StepArgs:
        cos, sin = self.rotary
        step = StepArgs(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slot_mapping=context.slot_mapping(layer).data_ptr(),
            num_tokens=len(cos),
            num_threads=torch.get_num_threads(),
        )
        assert isinstance(context.backend, NativeAttention)
        context.backend.point_to_step(group, step)
        return step

    def reserve(self, num_rows: int) -> None:
        """Make room for ``num_rows`` tokens; what was taken before may go."""
        if num_rows > self._num_rows:
            self.release()
            self._num_rows = num_rows

    def release(self) -> None:
        """Give the memory back; what was taken before goes."""
        self.generation += 1
        self._num_rows = 0
        self._buffers.clear()
        self._of = None, None

    def take(self, name: str, width: int) -> torch.Tensor:
        """Uninitialised, contiguous [rows, width]; the same to everyone who asks for it."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self._empty.new_empty(self._num_rows, width)
        return self._buffers[name, width]

    def take_factor(self, name: str, width: int) -> torch.Tensor:
        """The same, but laid out to be multiplied by a weight (see ``rows_apart``)."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = gemm.rows_apart(self._num_rows, width, self._empty)
        return self._buffers[name, width]


def fuse_native_layers(model: nn.Module, layout: KVLayout) -> int:
    """Swap the layers that give the same as one call.

    Call it after ``fuse`` and ``pack_linears``.

    Returns:
        The number of layers swapped.
    """
    dtype = next(model.parameters()).dtype
    workspace = Workspace(dtype)

    def make(layer: Any) -> nn.Module | None:
        return NativeDecoderLayer(layer, workspace) if _fits(layer, dtype) else None

    return swap_layers(model, layout, make)


def _fits(layer: Any, dtype: torch.dtype) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    if not (supports(dtype) and type(attention) is FusedAttention and type(mlp) is FusedGatedMLP):
        return False
    if attention.variant.sinks is not None:
        return False  # the C function takes them as float32, which they may not be
    norms = layer.input_layernorm, layer.post_attention_layernorm
    products = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    return all(type(norm) is FusedRMSNorm and norm.weight.dtype == dtype for norm in norms) and all(
        type(product) is PackedLinear and product.own is not None for product in products
    )


def _norm(norm: FusedRMSNorm, x: torch.Tensor, out: torch.Tensor) -> row_ops.RMSNormArgs:
    return row_ops.rms_norm_args(x, norm.weight, eps=norm.eps, offset=norm.offset, out=out)


def _product(
    linear: Any, x: torch.Tensor, out: torch.Tensor, *, adds: bool = False
) -> gemm.GemmArgs:
    return gemm.gemm_args(x, linear.own, linear.bias, out=out, adds=adds)
