"""Attention within each sequence of a packed row, both ways or causal, for transformers' classes.

Registered with transformers' ``AttentionInterface`` and without a mask function, so that
transformers makes no mask. Neighbors of equal length are one batch of torch's attention without
padding; steps are sorted by length, so there are few such batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from batchinfer.worker.attention.attention import UnsupportedAttentionError

ENCODER_ATTENTION = "batchinfer_encoder"

_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "relative_attention_bias")
"""Arguments that would change the result, and that this function does not implement."""

Runs = Sequence[tuple[int, int, int]]
"""Runs of equal sequences, as in ``EncoderStep.runs``."""

_packed: ContextVar[tuple[Runs, bool]] = ContextVar("packed_sequences")


@contextmanager
def packed_sequences(runs: Runs, *, causal: bool = False) -> Iterator[None]:
    """Set the sequences of the packed row that attention layers called inside get.

    Args:
        causal: no token attends to later ones.
    """
    token = _packed.set((runs, causal))
    try:
        yield
    finally:
        _packed.reset(token)


def current_runs() -> Runs:
    """The sequences of the packed row, inside ``packed_sequences``."""
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
    """Attention as transformers calls it in every layer; returns [1, T, Hq, Dv] and no weights.

    Args:
        sliding_window: a token attends to those less than this away; None: to all.

    Raises:
        UnsupportedAttentionError: the model asks for a mask, a bias or changed scores.
    """
    if attention_mask is not None:
        raise UnsupportedAttentionError(f"{type(module).__name__} makes its own attention mask")
    if query.shape[0] != 1:
        raise UnsupportedAttentionError(f"{type(module).__name__} reshapes its batch")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} passes {name}")
    group = query.shape[1] // key.shape[1]
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    runs, causal = _packed.get()
    for start, count, length in runs:
        whole = slice(start, start + count * length)
        shape = (count, length)
        queries, keys, values = (
            each[0, :, whole].view(-1, *shape, each.shape[-1]).transpose(0, 1)
            for each in (query, key, value)
        )
        if group > 1:
            keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
        band = _band(length, sliding_window, query, causal=causal)
        attended = scaled_dot_product_attention(
            *(queries, keys, values),
            attn_mask=band,
            is_causal=causal and band is None,
            scale=scaling,
        )
        out[whole].view(*shape, *out.shape[1:]).transpose(1, 2).copy_(attended)
    return out[None], None


def _band(
    length: int, width: int | None, like: torch.Tensor, *, causal: bool
) -> torch.Tensor | None:
    """[length, length] to add to scores so that tokens ``width`` apart do not attend to each other;
    None: all do."""
    if not width or length <= width:
        return None
    places = torch.arange(length, device=like.device)
    distances = places[:, None] - places[None]
    apart = distances.abs() >= width
    if causal:
        apart |= distances < 0
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(
        apart, float("-inf")
    )


def register() -> None:
    """Register ``attn_implementation="batchinfer_encoder"`` with transformers."""
    AttentionInterface.register(ENCODER_ATTENTION, encoder_attention_forward)
