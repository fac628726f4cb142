"""Log-probabilities of prompt tokens, collected over several steps.

Scoring needs the logits from position ``Request.logits_from`` to the prompt's second-to-last
position, because the logits at a position predict the next token. Known values are kept after a
preemption or a failed step. A prefix hit ends before the first position whose logits are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.engine.step import Float32, Int32, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's last N tokens, from the model's unmodified logits."""

    logprobs: Float32  # [N]
    ranks: Int32  # [N] 1 = most likely
    top_token_ids: Int32  # [N, L] best first
    top_logprobs: Float32  # [N, L]
    named_logprobs: Float32 | None = None  # [N, W] log-probabilities of named ids; -inf = padding


class PromptScores:
    """Collects the log-probabilities of one prompt in order of position.

    Args:
        num_top: alternatives per token.
        start: first position that needs logits.
        stop: end of the positions that need logits, exclusive.
    """

    def __init__(self, num_top: int, start: int, stop: int, num_named: int = 0) -> None:
        self.num_top = num_top
        self.num_named = num_named
        self.next = start
        """First position with unknown logits."""
        self.stop = stop
        self.nonfinite = False
        """True if any logit was NaN or +inf."""
        self._known: list[StepResult] = []

    def take(self, start: int, result: StepResult) -> None:
        """Add the positions of a step's result that are not known yet. The result begins at
        position ``start``."""
        new = np.arange(len(result.logprobs)) >= self.next - start
        assert start <= self.next, "logits of a position were skipped"
        self.next += int(new.sum())
        self.nonfinite |= bool(result.nonfinite[new].any())
        self._known.append(result.only(new))

    def logprobs(self) -> PromptLogprobs:
        """Return all log-probabilities. Requires that no position is missing."""
        assert self.next >= self.stop
        floats, ints = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int32)
        logprobs, ranks = [floats], [ints]
        top_ids = [np.empty((0, self.num_top), dtype=np.int32)]
        top_logprobs = [np.empty((0, self.num_top), dtype=np.float32)]
        named = [np.empty((0, self.num_named), dtype=np.float32)]
        for result in self._known:
            assert result.ranks is not None
            assert result.top_token_ids is not None
            assert result.top_logprobs is not None
            logprobs.append(result.logprobs)
            ranks.append(result.ranks)
            top_ids.append(result.top_token_ids[:, : self.num_top])
            top_logprobs.append(result.top_logprobs[:, : self.num_top])
            if self.num_named:
                assert result.named_logprobs is not None
                named.append(result.named_logprobs[:, : self.num_named])
        return PromptLogprobs(
            np.concatenate(logprobs),
            np.concatenate(ranks),
            np.concatenate(top_ids),
            np.concatenate(top_logprobs),
            np.concatenate(named) if self.num_named else None,
        )
