"""Log-probabilities of prompt tokens, collected over steps.

The logits at a position are of the token after it, so they are taken from the positions
``Request.logits_from`` to the prompt's last but one; the last one's are what output is drawn from.
What is known stays known when a sequence is preempted or a step fails: only positions after it
keep a sequence from taking blocks that another computed.
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
    named_logprobs: Float32 | None = None  # [N, W] of the ids asked for; -inf where there is none


class PromptScores:
    """Collects the log-probabilities of one prompt, from its beginning on.

    Args:
        num_top: alternatives wanted for each token.
        num_named: most ids that are asked for at one of them.
        start: the first position whose logits are wanted.
        stop: the first after it of which none are.
    """

    def __init__(self, num_top: int, start: int, stop: int, num_named: int = 0) -> None:
        self.num_top = num_top
        self.num_named = num_named
        self.next = start
        """The first position whose logits are not known."""
        self.stop = stop
        self.nonfinite = False
        """Whether logits held NaN or +inf."""
        self._known: list[StepResult] = []

    def take(self, start: int, result: StepResult) -> None:
        """Add a step's result for the positions from ``start`` on; some may be known."""
        new = np.arange(len(result.logprobs)) >= self.next - start
        assert start <= self.next, "logits of a position were passed over"
        self.next += int(new.sum())
        self.nonfinite |= bool(result.nonfinite[new].any())
        self._known.append(result.only(new))

    def logprobs(self) -> PromptLogprobs:
        """The log-probabilities, when all that are wanted are known."""
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
