"""A layer's attention, gated MLP and norms with fewer passes over memory than transformers' own.

Each replaces one of transformers' modules and is called like it. They fit many families but not
all: ``fuse`` compares each with the original before it is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchinfer.worker.attention.attention import current_context
from batchinfer.worker.attention.variant import AttentionVariant
from batchinfer.worker.linear.packed_linear import merged
from batchinfer.worker.ops import HeadNorms, rms_norm, silu_mul


class FusedAttention(nn.Module):
    """One product for q, k and v; head norms, rotary positions and the KV write in one pass.

    Args:
        attention: with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and both of ``q_norm`` and
            ``k_norm`` or neither.
        variant: how the original calls paged attention.
        norm_offset: added to the weights of the norms.
    """

    def __init__(self, attention: Any, variant: AttentionVariant, norm_offset: float = 0.0) -> None:
        super().__init__()
        keep_plain_attributes(self, attention)
        self.qkv_proj = merged(attention.q_proj, attention.k_proj, attention.v_proj)
        self.starts = starts_of(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        self.o_proj = attention.o_proj
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
        """Attention over the current forward context's cache: [1, T, hidden], no weights."""
        context = current_context()
        shape = context.cache.shape(self.layer)
        cos, sin = position_embeddings
        qkv = self.qkv_proj(hidden_states[0])
        context.cache.rotary_write(
            self.layer, qkv, cos[0], sin[0], context.slot_mapping(self.layer), self.head_norms()
        )
        query = qkv[:, : qkv.shape[1] - 2 * shape.num_kv_heads * shape.key_width]
        query = query.unflatten(1, (-1, shape.key_width))
        out = context.backend.attend(self.layer, query, self.variant)
        return self.o_proj(out.flatten(1))[None], None

    def head_norms(self) -> HeadNorms | None:
        """The norms of query and key heads; None if the layer has none."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(
            self.q_norm.weight, self.k_norm.weight, norm_eps(self.q_norm), self.norm_offset
        )


class FusedGatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with one product for gate and up."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        keep_plain_attributes(self, mlp)
        self.gate_up_proj = merged(mlp.gate_proj, mlp.up_proj)
        self.starts = starts_of(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to [..., hidden]."""
        gate_up = self.gate_up_proj(x.reshape(-1, x.shape[-1]))
        out: torch.Tensor = self.down_proj(silu_mul(gate_up)).view(x.shape)
        return out


class FusedRMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, norm: Any, offset: float) -> None:
        super().__init__()
        keep_plain_attributes(self, norm)
        self.weight, self.eps, self.offset = norm.weight, norm_eps(norm), offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]."""
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset)


def starts_of(parent: Any, merged_name: str, names: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    """The location of ``parent``'s linear layers after merging in this order: by name, the merged
    layer's name and the first output in it."""
    starts, start = {}, 0
    for name in names:
        starts[name] = (merged_name, start)
        start += getattr(parent, name).out_features
    return starts


def norm_eps(norm: Any) -> float:
    """The epsilon of one of transformers' norms, whose name differs between families."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def keep_plain_attributes(fused: nn.Module, original: nn.Module) -> None:
    """Copy the settings that layers read from their modules: ``layer_idx``, ``is_sliding``,
    ``head_dim``."""
    for name, value in vars(original).items():
        if not name.startswith("_") and isinstance(value, bool | int | float | str | None):
            setattr(fused, name, value)
