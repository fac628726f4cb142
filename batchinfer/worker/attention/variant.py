from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    scale: float
    """Factor that multiplies the scores."""
    sliding_window: int = 0
    """Number of positions that a token sees, including its own; 0: all positions."""
    softcap: float = 0.0
    """The limit c: each score becomes ``c * tanh(score / c)``; 0: scores stay unchanged."""
    sinks: torch.Tensor | None = None
    """[Hq] an additional logit for each head, without a value (gpt-oss)."""
    ignores_query_ends: bool = False
    """True if attention is causal even where ``Step.query_ends`` lets the tokens of an image attend
    to later tokens."""
    prompt_window: int = 0
    """Number of positions that a token sees, including its own, in addition to its sequence's
    prompt (Unlimited-OCR); 0: the window hides the prompt too."""

    def options(self, prompt_lens: Any) -> dict[str, Any]:
        """Return the variant as keyword arguments of the kernels. ``prompt_lens`` [S] holds the
        length of each sequence's prompt; None means that all tokens of the step belong to
        prompts."""
        window, is_seen = self.sliding_window, self.prompt_window and prompt_lens is not None
        return {
            "scale": self.scale,
            "sliding_window": self.prompt_window if is_seen else window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "prompt_lens": prompt_lens if is_seen else None,
        }
