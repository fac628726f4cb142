"""The variant of attention that a layer computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """Causal softmax attention, as one layer of a model wants it."""

    scale: float
    """Multiplies the scores."""
    sliding_window: int = 0
    """Positions a token sees, its own included; 0 for all."""
    softcap: float = 0.0
    """c * tanh(score / c) takes the place of a score; 0 for none."""
    sinks: torch.Tensor | None = None
    """[Hq] one more logit a head, without a value (gpt-oss)."""
