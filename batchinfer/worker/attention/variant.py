"""The variant of attention that a layer computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """Causal softmax attention as one layer of a model computes it."""

    scale: float
    """Multiplies the scores."""
    sliding_window: int = 0
    """Positions a token sees, its own included; 0 for all."""
    softcap: float = 0.0
    """c in c * tanh(score / c), which replaces a score; 0 for none."""
    sinks: torch.Tensor | None = None
    """[Hq] one more logit for each head, without a value (gpt-oss)."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels."""
        return {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
