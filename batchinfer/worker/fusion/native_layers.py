"""Runs decoder layers in C on a CPU, with one call for each layer or for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.kernels.cpu import gemm, row_ops
from batchinfer.kernels.cpu.decoder_layer import (
    LayerArgs,
    StepArgs,
    array_of_layers,
    array_of_steps,
    decoder_layers,
    supports,
)
from batchinfer.worker.attention.attention import ForwardContext, current_context
from batchinfer.worker.attention.native_cpu import NativeAttention
from batchinfer.worker.fusion.fused_modules import (
    PROBE_TOKENS,
    FusedAttention,
    FusedDecoderLayer,
    FusedGatedMLP,
    FusedRMSNorm,
    keep_plain_attributes,
)
from batchinfer.worker.linear.packed_linear import PackedLinear
from batchinfer.worker.model.body import body_of
from batchinfer.worker.ops import head_norm_options
from batchinfer.worker.self_test import ModuleCall, Probe, find_swaps, record_calls, swap_verified

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [1, T, rotary width]."""


class NativeLayers(nn.Module):
    def __init__(self, layers: Sequence[Any], workspace: Workspace) -> None:
        super().__init__()
        keep_plain_attributes(self, layers[0])
        self.layers = nn.ModuleList(layers)
        self.workspace = workspace

    def run_in_python(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """Run the layers on [1, T, hidden] in place, and return ``hidden_states``."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, **options)
        return hidden_states


class NativeDecoderLayers(NativeLayers):
    """Runs consecutive layers in one call to C. The Python layers' many calls take a tenth of a
    decode step's time.

    The results have the same bits as the Python layers' results. The Python layers still run in
    steps with adapters, in steps with images that change the outputs of layers (DeepStack), and
    over a float8 pool, which the C layers cannot read.

    Args:
        layers: ``FusedDecoderLayer``s of fused modules with packed weights.
        workspace: buffers that all layers of a model share.
    """

    def __init__(self, layers: Sequence[Any], workspace: Workspace) -> None:
        super().__init__(layers, workspace)
        self._groups: dict[int, int] = {}  # number of one layer of each group, keyed by group
        self._arguments, self._steps = array_of_layers([]), array_of_steps([])
        self._made_for: tuple[object, ...] = ()

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden], contiguous
        position_embeddings: Rotary,
        **options: Any,
    ) -> torch.Tensor:
        """Run the layers in place, and return ``hidden_states``."""
        context, workspace = current_context(), self.workspace
        backend = context.backend
        has_extras = context.adapters is not None or context.has_layer_hooks
        if has_extras or not (isinstance(backend, NativeAttention) and backend.joins_layers):
            return self.run_in_python(
                hidden_states, position_embeddings=position_embeddings, **options
            )
        workspace.begin_step(context, position_embeddings)
        made_for = context.cache, backend.kernel, workspace.generation
        if made_for != self._made_for:
            try:
                self._make_arguments(hidden_states[0], context)
            except (MemoryError, RuntimeError):
                workspace.release()  # free memory for the smaller step that follows
                raise
            self._made_for = made_for
        for group, number in self._groups.items():
            workspace.step_of(group, number).hidden = hidden_states.data_ptr()
        decoder_layers(self._arguments, self._steps, hidden_states.dtype)
        return hidden_states

    def _make_arguments(self, hidden: torch.Tensor, context: ForwardContext) -> None:
        """Make the C arguments that stay the same for all steps over this pool and workspace.
        ``StepArgs`` holds the others."""
        layers: list[Any] = [*self.layers]
        numbers = [layer.self_attn.layer for layer in layers]
        groups = [context.cache.group(number) for number in numbers]
        self._groups = dict(zip(groups, numbers, strict=True))
        self._arguments = array_of_layers(
            [self._arguments_of(layer, hidden, context) for layer in layers]
        )
        steps = [self.workspace.step_of(*pair) for pair in zip(groups, numbers, strict=True)]
        self._steps = array_of_steps(steps)

    def _arguments_of(self, layer: Any, hidden: torch.Tensor, context: ForwardContext) -> LayerArgs:
        """Return a layer's arguments, with strides that are valid for steps of any length. (The
        strides of a one-row tensor may be arbitrary.)"""
        cache, backend = context.cache, context.backend
        assert isinstance(backend, NativeAttention)
        attention = layer.self_attn
        width, workspace = cache.shape(attention.layer).key_width, self.workspace
        hidden = hidden.as_strided(hidden.shape, (hidden.shape[1], 1))
        normed = workspace.take_padded("normed", hidden.shape[1])
        qkv = workspace.take("qkv", attention.qkv_proj.out_features)
        attended = workspace.take_padded("attended", attention.o_proj.linear.in_features)
        query, gate = attention.queries_and_gates(qkv, cache.shape(attention.layer))
        out = attended.view(len(qkv), -1, width)
        return LayerArgs(
            norm_args(layer.input_layernorm, hidden, normed),
            linear_args(attention.qkv_proj, normed, qkv),
            row_ops.rotary_write_args(
                *(qkv, *workspace.rotary, cache.key(attention.layer), cache.value(attention.layer)),
                context.slot_mapping(attention.layer),
                **head_norm_options(attention.head_norms()),
                query_head_stride=query.stride(1),
            ),
            backend.arguments(attention.layer, query, attention.variant, out=out),
            row_ops.SigmoidMulArgs() if gate is None else row_ops.sigmoid_mul_args(out, gate),
            linear_args(attention.o_proj.linear, attended, hidden, adds=True),
            *mlp_args(layer, hidden, normed, workspace),
        )


class Workspace:
    """Buffers of one dtype for a layer's intermediate results, reused by later layers and steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generation = 0
        """Number that changes whenever the buffers are allocated again."""
        self._num_rows = 0  # capacity in tokens
        self._empty = torch.empty(0, dtype=dtype)
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self.rotary = self._empty, self._empty
        """Cosines and sines of the step, [T, rotary width]."""
        self._current: tuple[ForwardContext, Rotary] | None = None  # context of the running step
        self._steps: dict[int, StepArgs] = {}  # keyed by layer group, at fixed addresses
        self._updated: set[int] = set()  # groups already updated for this step

    def begin_step(self, context: ForwardContext, position_embeddings: Rotary) -> None:
        """Begin a step and reserve its buffers, unless an earlier layer has done so."""
        if (
            self._current
            and self._current[0] is context
            and self._current[1] is position_embeddings
        ):
            return
        cos, sin = position_embeddings
        self.rotary = cos[0].contiguous(), sin[0].contiguous()
        self.reserve(len(self.rotary[0]))
        self._updated.clear()
        self._current = context, position_embeddings

    def step_of(self, group: int, layer: int) -> StepArgs:
        """Return the step arguments of a layer group, updated once per step, at the same address in
        all steps. ``layer`` is any layer of the group."""
        step = self._steps.setdefault(group, StepArgs())
        if group not in self._updated:
            self._update(step, group, layer)
            self._updated.add(group)
        return step

    def _update(self, step: StepArgs, group: int, layer: int) -> None:
        assert self._current is not None
        context, (cos, sin) = self._current[0], self.rotary
        assert isinstance(context.backend, NativeAttention)
        step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
        step.slot_mapping = context.slot_mapping(layer).data_ptr()
        step.num_tokens, step.num_threads = len(cos), torch.get_num_threads()
        context.backend.point_to_step(group, step)

    def reserve(self, num_rows: int) -> None:
        """Make buffers that are taken later large enough for ``num_rows`` tokens. May free earlier
        buffers."""
        if num_rows > self._num_rows:
            self.release()
            self._num_rows = num_rows

    def release(self) -> None:
        self.generation += 1
        self._num_rows = 0
        self._buffers.clear()
        self._current = None

    def take(self, name: str, width: int) -> torch.Tensor:
        """Return an uninitialized buffer [rows, width]. Equal arguments give the same buffer."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self._empty.new_empty(self._num_rows, width)
        return self._buffers[name, width]

    def take_padded(self, name: str, width: int) -> torch.Tensor:
        """Like ``take``, with padded rows for matrix multiplications."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = gemm.padded_rows(self._num_rows, width, self._empty)
        return self._buffers[name, width]


@torch.inference_mode()
def fuse_native_layers(model: nn.Module, layout: KVLayout) -> None:
    """Replace each fused layer with a native layer, if the results' bits stay the same. Call this
    after ``fuse`` and ``pack_linears``."""
    dtype = next(model.parameters()).dtype
    workspace = Workspace(dtype)

    def make(layer: Any) -> nn.Module | None:
        return NativeDecoderLayers([layer], workspace) if _fits(layer, dtype) else None

    if swaps := find_swaps(model, make):
        probe = Probe(model, layout, PROBE_TOKENS)
        swap_verified(swaps, probe.logits, probe.logits(), 0.0)


@torch.inference_mode()
def join_native_layers(model: nn.Module, layout: KVLayout) -> None:
    """Join all layers into one call, if all are native, the model calls them consecutively, and the
    results' bits stay the same."""
    probe = Probe(model, layout, PROBE_TOKENS)

    def join(layers: Any) -> nn.Module | None:
        parts = [*layers] if isinstance(layers, nn.ModuleList) else []
        if len(parts) < 2 or not all(isinstance(part, NativeDecoderLayers) for part in parts):
            return None
        with record_calls(parts) as calls:
            probe.logits()
        if not _share_one_tensor(calls, parts):
            return None
        return nn.ModuleList([NativeDecoderLayers([*layers_of(layers)], parts[0].workspace)])

    if swaps := find_swaps(model, join):
        swap_verified(swaps, probe.logits, probe.logits(), 0.0)


def decoder_layers_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers, joined or not; an empty list if the model's body has no
    ``layers``."""
    return [*layers_of(getattr(body_of(model), "layers", nn.ModuleList()))]


def layers_of(modules: nn.ModuleList) -> nn.ModuleList:
    """Return a model's layers, with each native layer replaced by the Python layers inside it."""
    return nn.ModuleList(
        layer
        for module in modules
        for layer in (module.layers if isinstance(module, NativeLayers) else [module])
    )


def _share_one_tensor(calls: list[ModuleCall], layers: list[nn.Module]) -> bool:
    """Return True if each layer was called once, in order, with the same hidden-states tensor
    (which layers change in place) and the same rotary tensors. The tensors' identity is compared,
    because equal rotary values at the probe's positions may differ at other positions."""
    hidden, rotary = calls[0].arguments[0], calls[0].options["position_embeddings"]
    return [call.module for call in calls] == layers and all(
        call.arguments[0] is hidden and call.options["position_embeddings"] is rotary
        for call in calls
    )


def _fits(layer: Any, dtype: torch.dtype) -> bool:
    if type(layer) is not FusedDecoderLayer or not supports(dtype):
        return False
    if layer.mixer != "self_attn":
        return False
    attention = layer.self_attn
    if type(attention) is not FusedAttention or attention.variant.sinks is not None:
        return False  # the C function takes float32 sinks only
    if attention.variant.ignores_query_ends:
        return False  # in C, all layers of a group use the same query ends
    return parts_fit(layer, (attention.qkv_proj, attention.o_proj.linear), dtype)


def parts_fit(layer: Any, linears: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return True if C functions can run a layer's norms, MLP and ``linears``."""
    norms, mlp = (layer.input_layernorm, layer.post_attention_layernorm), layer.mlp
    if type(mlp) is not FusedGatedMLP:
        return False
    linears = *linears, mlp.gate_up_proj, mlp.down_proj.linear
    return all(type(norm) is FusedRMSNorm and norm.weight.dtype == dtype for norm in norms) and all(
        type(linear) is PackedLinear and linear.native is not None for linear in linears
    )


def mlp_args(
    layer: Any, hidden: torch.Tensor, normed: torch.Tensor, workspace: Workspace
) -> tuple[Any, ...]:
    """Return the arguments of the norm, two GEMMs and activation of a layer's MLP.

    Args:
        hidden: the hidden state [T, hidden], to which the MLP is added.
        normed: buffer [T, hidden] for the normed hidden state.
    """
    gate_up_proj, down_proj = layer.mlp.gate_up_proj, layer.mlp.down_proj.linear
    gate_up = workspace.take("gate_up", gate_up_proj.out_features)
    gated = workspace.take_padded("gated", down_proj.in_features)
    return (
        norm_args(layer.post_attention_layernorm, hidden, normed),
        linear_args(gate_up_proj, normed, gate_up),
        row_ops.silu_mul_args(gate_up, out=gated),
        linear_args(down_proj, gated, hidden, adds=True),
    )


def norm_args(norm: FusedRMSNorm, x: torch.Tensor, out: torch.Tensor) -> row_ops.RMSNormArgs:
    return row_ops.rms_norm_args(x, norm.weight, eps=norm.eps, offset=norm.offset, out=out)


def linear_args(
    linear: Any, x: torch.Tensor, out: torch.Tensor, *, adds: bool = False
) -> gemm.GemmArgs:
    """Return the arguments of a ``PackedLinear``'s multiplication of x [T, in_features].

    Args:
        adds: True to add the product to ``out`` instead of overwriting it.
    """
    return gemm.gemm_args(x, linear.native.weight, linear.bias, out=out, adds=adds)
