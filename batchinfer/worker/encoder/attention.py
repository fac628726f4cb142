"""Attention for encoders, bidirectional or causal, within each sequence of a packed row.

The attention function is registered with transformers' ``AttentionInterface``, without a mask
function, so transformers makes no mask. Neighboring sequences of equal length form one batch for
torch's attention, without padding. The sequences of a step are sorted by length, so there are few
batches.

MPNet's attention adds a bias that depends on the distance between tokens (Song et al. 2020,
arXiv:2004.09297). transformers' MPNet classes do not use ``AttentionInterface``, so subclasses
override their methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from batchinfer.worker.attention.attention import UnsupportedAttentionError

ENCODER_ATTENTION = "batchinfer_encoder"

_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "relative_attention_bias")
"""Arguments that would change the result, and that encoder attention does not implement."""

Runs = Sequence[tuple[int, int, int]]
"""Runs of sequences of equal length, as in ``EncoderStep.runs``."""

_packed: ContextVar[tuple[Runs, bool]] = ContextVar("packed_sequences")


@contextmanager
def packed_sequences(runs: Runs, *, causal: bool = False) -> Iterator[None]:
    """Set the sequences of the packed row for attention layers that run inside the ``with`` block.

    Args:
        causal: True if tokens do not attend to later tokens.
    """
    token = _packed.set((runs, causal))
    try:
        yield
    finally:
        _packed.reset(token)


def current_runs() -> Runs:
    """Return the ``runs`` that ``packed_sequences`` has set.

    Raises:
        LookupError: the call is not inside ``packed_sequences``.
    """
    return _packed.get()[0]


def encoder_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, Dk]
    key: torch.Tensor,  # [1, Hkv, T, Dk]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention for transformers. Return the output [1, T, Hq, Dv], and None for
    the attention weights.

    Args:
        sliding_window: tokens attend only to tokens that are fewer than this many positions away;
            None: to all tokens.

    Raises:
        UnsupportedAttentionError: the model passes a mask, a bias or changed scores.
    """
    if attention_mask is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__} builds its own attention mask")
    if query.shape[0] != 1:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} calls attention with a batch of {query.shape[0]} rows, not 1"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} passes {name}")
    group = query.shape[1] // key.shape[1]
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    runs, causal = _packed.get()
    for start, count, length in runs:
        packed = slice(start, start + count * length)
        shape = (count, length)
        queries, keys, values = (
            states[0, :, packed].view(-1, *shape, states.shape[-1]).transpose(0, 1)
            for states in (query, key, value)
        )
        if group > 1:
            keys, values = (states.repeat_interleave(group, dim=1) for states in (keys, values))
        band = _band(length, sliding_window, query, causal=causal)
        attended = scaled_dot_product_attention(
            *(queries, keys, values),
            attn_mask=band,
            is_causal=causal and band is None,
            scale=scaling,
        )
        out[packed].view(*shape, *out.shape[1:]).transpose(1, 2).copy_(attended)
    return out[None], None


def _band(
    length: int, width: int | None, like: torch.Tensor, *, causal: bool
) -> torch.Tensor | None:
    """Return a bias [length, length] that masks tokens at a distance of ``width`` or more, or None
    if there are no such tokens."""
    if not width or length <= width:
        return None
    positions = torch.arange(length, device=like.device)
    distances = positions[:, None] - positions[None]
    is_masked = distances.abs() >= width
    if causal:
        is_masked |= distances < 0
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(
        is_masked, float("-inf")
    )


def register() -> None:
    """Register ``attn_implementation="batchinfer_encoder"`` with transformers."""
    AttentionInterface.register(ENCODER_ATTENTION, encoder_attention_forward)


class _PackedMPNetAttention(MPNetSelfAttention):  # type: ignore[misc]
    """MPNet's attention within each packed sequence. Outside ``packed_sequences``, it behaves like
    transformers' class."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, width]
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,  # [1, heads, L, L], L: the longest sequence
        **options: Any,
    ) -> Any:
        """Return the output [1, T, width] in a tuple."""
        packed = _packed.get(None)
        if packed is None:
            return super().forward(hidden_states, attention_mask, position_bias, **options)
        assert position_bias is not None
        heads, width = self.num_attention_heads, self.attention_head_size
        queries, keys, values = (
            linear(hidden_states)[0].view(-1, heads, width) for linear in (self.q, self.k, self.v)
        )
        out = torch.empty_like(queries)
        for start, count, length in packed[0]:
            span, shape = slice(start, start + count * length), (count, length, heads, width)
            query, key, value = (
                states[span].view(shape).transpose(1, 2) for states in (queries, keys, values)
            )
            bias = position_bias[:, :, :length, :length]
            attended = scaled_dot_product_attention(query, key, value, attn_mask=bias)
            out[span].view(shape).copy_(attended.transpose(1, 2))
        return (self.o(out.view(1, -1, heads * width)),)


class _PackedMPNetEncoder(MPNetEncoder):  # type: ignore[misc]
    """Computes the distance bias for the longest sequence L. Shorter sequences use a part of the
    bias."""

    def compute_position_bias(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Return the bias [1, heads, L, L]."""
        packed = _packed.get(None)
        longest = x.shape[1] if packed is None else max(length for _, _, length in packed[0])
        bias: torch.Tensor = super().compute_position_bias(x[:, :longest], *args, **options)
        return bias


def pack_mpnet(body: PreTrainedModel) -> None:
    """Make the layers of an MPNet model compute each sequence of a packed row separately. Does not
    change models of other families."""
    for module in body.modules():
        if type(module) is MPNetSelfAttention:
            module.__class__ = _PackedMPNetAttention
        elif type(module) is MPNetEncoder:
            module.__class__ = _PackedMPNetEncoder
