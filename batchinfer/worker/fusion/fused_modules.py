"""Attention, gated MLP, norms and decoder layers that read and write memory less often.

Each fused module replaces a module of transformers and takes the same arguments. A fused module is
not correct for every family, so ``fuse`` compares it with the original.

In a layer with Llama's structure, both the attention (or recurrence) and the MLP end with
``residual + x @ weight.T``. A matrix multiplication can include the addition at no cost. This saves
two kernel launches per layer, each of which would read two tensors and write one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from batchinfer.engine.kv.kv_shapes import KVShape
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.kernels.rotary_pairs import PER_ELEMENT, RotaryPairs
from batchinfer.worker.attention.attention import current_context
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.linear.packed_linear import merged
from batchinfer.worker.model.quantization import is_plain
from batchinfer.worker.ops import HeadNorms, rms_norm, sigmoid_mul, silu_mul
from batchinfer.worker.self_test import Probe, find_swaps, swap_verified

LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Tolerance for logits, keyed by the model's dtype. Fused modules round to 16 bits less often, so
their logits differ slightly."""
PROBE_TOKENS = (3, 7, 5, 3)
_MIXERS = {"self_attn", "linear_attn"}
"""Possible names of a layer's token mixer, which is attention or a recurrence."""
_LAST_LINEARS = ("o_proj", "out_proj")
_OTHER_PARTS = {"mlp", "input_layernorm", "post_attention_layernorm"}


class FusedAttention(nn.Module):
    """Attention with one matrix multiplication for q, k and v, and one pass for head norms, rotary
    positions and the KV write.

    If ``q_proj`` has twice as many outputs as ``o_proj`` has inputs, each query head is followed by
    a gate of the same width, whose sigmoid multiplies the head's output (Qwen3-Next, Qwen3.5).

    Args:
        attention: module with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, and perhaps with
            both ``q_norm`` and ``k_norm``.
        norm_offset: number added to the weights of the norms.
    """

    def __init__(
        self,
        attention: Any,
        variant: AttentionVariant,
        norm_offset: float = 0.0,
        pairs: RotaryPairs = PER_ELEMENT,
    ) -> None:
        super().__init__()
        keep_plain_attributes(self, attention)
        self.o_proj, self.pairs, self.is_gated = attention.o_proj, pairs, False
        if hasattr(attention, "qkv_proj"):
            self.qkv_proj = attention.qkv_proj
        else:
            self.qkv_proj = merged(attention.q_proj, attention.k_proj, attention.v_proj)
            self.starts = starts_of(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
            self.is_gated = attention.q_proj.out_features == 2 * attention.o_proj.in_features
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.variant, self.norm_offset = variant, norm_offset
        self.layer = int(attention.layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, hidden]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin [1, T, rotary width]
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention over the forward context's cache. Return the output [1, T, hidden], and
        None for the attention weights."""
        context = current_context()
        shape = context.cache.shape(self.layer)
        cos, sin = position_embeddings
        qkv = self.qkv_proj(hidden_states[0])
        query, gate = self.queries_and_gates(qkv, shape)
        context.cache.rotary_write(
            *(self.layer, qkv, cos[0], sin[0], context.slot_mapping(self.layer)),
            *(self.head_norms(), query.stride(1), self.pairs),
        )
        out = context.backend.attend(self.layer, query, self.variant)
        if gate is not None:
            sigmoid_mul(out, gate)
        return self.o_proj(out.flatten(1))[None], None

    def queries_and_gates(
        self, qkv: torch.Tensor, shape: KVShape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return views of the query heads, and of their gates or None, [T, Hq, key_width], in the
        output of ``qkv_proj``."""
        width = shape.key_width
        heads: Any = qkv[:, : qkv.shape[1] - 2 * shape.num_kv_heads * width]
        if not self.is_gated:
            return heads.unflatten(1, (-1, width)), None
        query, gate = heads.unflatten(1, (-1, 2, width)).unbind(2)
        return query, gate

    def head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(
            self.q_norm.weight, self.k_norm.weight, norm_eps(self.q_norm), self.norm_offset
        )


class FusedGatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with one matrix multiplication for gate and up."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        keep_plain_attributes(self, mlp)
        if hasattr(mlp, "gate_up_proj"):
            self.gate_up_proj = mlp.gate_up_proj
        else:
            self.gate_up_proj = merged(mlp.gate_proj, mlp.up_proj)
            self.starts = starts_of(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x.reshape(-1, x.shape[-1]))
        out: torch.Tensor = self.down_proj(silu_mul(gate_up)).view(x.shape)
        return out


class FusedRMSNorm(nn.Module):
    def __init__(self, norm: Any, offset: float, *, centered: bool = False) -> None:
        super().__init__()
        keep_plain_attributes(self, norm)
        self.weight, self.eps, self.offset = norm.weight, norm_eps(norm), offset
        self.centered = centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, centered=self.centered)


def starts_of(parent: Any, merged_name: str, names: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    """Map the names of ``parent``'s merged linear layers to ``merged_name`` and the index of each
    layer's first output in the merged layer.

    Args:
        names: names relative to ``parent``, with dots for nested modules, in the order of merging.
    """
    starts, start = {}, 0
    for name in names:
        starts[name] = (merged_name, start)
        start += parent.get_submodule(name).out_features
    return starts


def norm_eps(norm: Any) -> float:
    """Return the epsilon of a norm, whose attribute name differs between families."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def keep_plain_attributes(fused: nn.Module, original: nn.Module) -> None:
    """Copy the settings that other modules read, such as ``layer_idx`` and ``is_sliding``."""
    for name, value in vars(original).items():
        if not name.startswith("_") and isinstance(value, bool | int | float | str | None):
            setattr(fused, name, value)


class AddLinear(nn.Module):
    """Adds ``x @ weight.T`` to ``residual``, which the caller sets before each call.

    Args:
        linear: a torch linear layer, or a module with ``add_to``.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear: Any = linear
        self.residual: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the linear layer's output for x [..., in_features] to the residual [T, out_features],
        and return the residual."""
        residual, self.residual = self.residual, None
        assert residual is not None
        rows = x.reshape(-1, x.shape[-1])
        if isinstance(self.linear, nn.Linear):
            residual.addmm_(rows, self.linear.weight.t())
            if self.linear.bias is not None:
                residual += self.linear.bias
        else:
            self.linear.add_to(residual, rows)
        return residual


class FusedDecoderLayer(nn.Module):
    """A pre-norm decoder layer that adds attention and MLP to the hidden state in place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        keep_plain_attributes(self, layer)
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mixer = _mixer(layer)
        mixer = getattr(layer, self.mixer)
        self.last_linear = _last_linear(mixer)
        setattr(self, self.mixer, _adding(mixer, self.last_linear))
        self.mlp = layer.mlp if _adds(layer.mlp) else _adding(layer.mlp, "down_proj")

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """Run the layer on [1, T, hidden] in place, and return the same tensor."""
        residual = hidden_states[0]
        attended = self.input_layernorm(hidden_states)
        mixer = getattr(self, self.mixer)
        getattr(mixer, self.last_linear).residual = residual
        mixer(hidden_states=attended, **options)
        gated = self.post_attention_layernorm(hidden_states)
        last = self.mlp if _adds(self.mlp) else self.mlp.down_proj
        last.residual = residual
        self.mlp(gated)
        return hidden_states


def _adds(module: nn.Module) -> bool:
    """Return True if a module can add its output to a residual."""
    return hasattr(module, "residual")


def _mixer(layer: nn.Module) -> str:
    """Return the name of a layer's token mixer; "" if the layer does not have exactly one."""
    parts = {name for name, _ in layer.named_children()} - _OTHER_PARTS
    return parts.pop() if len(parts) == 1 else ""


def _last_linear(mixer: nn.Module) -> str:
    """Return the name of a token mixer's last linear layer; "" if it has none."""
    return next((name for name in _LAST_LINEARS if hasattr(mixer, name)), "")


def _adding(module: nn.Module, name: str) -> Any:
    """Return a shallow copy of a module, in which an ``AddLinear`` replaces the linear layer
    ``name``."""
    adding = copy.copy(module)
    adding._modules = {**module._modules, name: AddLinear(getattr(module, name))}
    return adding


def fuse_layers(model: nn.Module, layout: KVLayout) -> int:
    """Replace pre-norm layers with layers that add in place, if the model's results stay the same.

    Call this after modules are fused and before weights are packed.

    Returns:
        The number of replaced layers: all candidates, or 0.
    """
    swaps = find_swaps(model, fused_layer)
    if not swaps:
        return 0
    probe = Probe(model, layout, PROBE_TOKENS)
    tolerance = LOGITS_TOLERANCE[next(model.parameters()).dtype]
    return len(swaps) if swap_verified(swaps, probe.logits, probe.logits(), tolerance) else 0


def fused_layer(layer: Any) -> FusedDecoderLayer | None:
    """Make a layer that adds in place; None if the module lacks parts of a decoder layer."""
    if not has_layer_parts(layer):
        return None
    token_mixer = getattr(layer, _mixer(layer))
    last = getattr(token_mixer, _last_linear(token_mixer), None)
    mlp_adds = _adds(layer.mlp) or is_plain(getattr(layer.mlp, "down_proj", None))
    return FusedDecoderLayer(layer) if is_plain(last) and mlp_adds else None


def has_layer_parts(layer: Any) -> bool:
    """Return True if a module has the parts of a pre-norm decoder layer."""
    return _mixer(layer) in _MIXERS and all(hasattr(layer, part) for part in _OTHER_PARTS)
