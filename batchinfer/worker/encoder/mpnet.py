"""MPNet over a packed row: its attention adds a bias by the distance of tokens (Song et al. 2020,
arXiv:2004.09297), and transformers' class calls no attention function.

transformers/models/mpnet/modeling_mpnet.py, ``MPNetSelfAttention`` and ``MPNetEncoder``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from batchinfer.worker.encoder.attention import Runs, current_runs


class _PackedAttention(MPNetSelfAttention):  # type: ignore[misc]
    """Behaves like transformers' own class outside ``packed_sequences``."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, width]
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,  # [1, heads, L, L], L of the longest sequence
        **options: Any,
    ) -> Any:
        """Attention within each sequence; [1, T, width] in a tuple."""
        runs = _runs()
        if runs is None:
            return super().forward(hidden_states, attention_mask, position_bias, **options)
        assert position_bias is not None
        heads, width = self.num_attention_heads, self.attention_head_size
        queries, keys, values = (
            product(hidden_states)[0].view(-1, heads, width) for product in (self.q, self.k, self.v)
        )
        out = torch.empty_like(queries)
        for start, count, length in runs:
            whole, shape = slice(start, start + count * length), (count, length, heads, width)
            query, key, value = (
                each[whole].view(shape).transpose(1, 2) for each in (queries, keys, values)
            )
            bias = position_bias[:, :, :length, :length]
            attended = scaled_dot_product_attention(query, key, value, attn_mask=bias)
            out[whole].view(shape).copy_(attended.transpose(1, 2))
        return (self.o(out.view(1, -1, heads * width)),)


class _PackedEncoder(MPNetEncoder):  # type: ignore[misc]
    """Computes the bias of distances for the longest sequence only: others use a part of it."""

    def compute_position_bias(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """The bias [1, heads, L, L]."""
        runs = _runs()
        longest = x.shape[1] if runs is None else max(length for _, _, length in runs)
        bias: torch.Tensor = super().compute_position_bias(x[:, :longest], *args, **options)
        return bias


def _runs() -> Runs | None:
    try:
        return current_runs()
    except LookupError:
        return None


def pack_attention(body: PreTrainedModel) -> None:
    """Make an MPNet's layers keep sequences of a packed row apart; other families, and names of
    weights, do not change."""
    for module in body.modules():
        if type(module) is MPNetSelfAttention:
            module.__class__ = _PackedAttention
        elif type(module) is MPNetEncoder:
            module.__class__ = _PackedEncoder
