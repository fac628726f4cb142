"""The variant of attention that a layer computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """The parameters of a layer's causal softmax attention."""

    scale: float
    """Factor by which the scores are multiplied."""
    sliding_window: int = 0
    """Number of positions that a token sees, including its own; 0: all positions."""
    softcap: float = 0.0
    """The limit c: each score becomes ``c * tanh(score / c)``; 0: scores stay unchanged."""
    sinks: torch.Tensor | None = None
    """[Hq] one more logit for each head, which has no value (gpt-oss)."""
    ignores_query_ends: bool = False
    """True if no token attends to later tokens, even where ``Step.query_ends`` lets the tokens of
    an image do so."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the variant as keyword arguments of the kernels."""
        return {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
