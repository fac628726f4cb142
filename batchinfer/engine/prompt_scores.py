"""Log-probabilities of tokens that a prompt holds: which a step gives, and those that are known.

The logits at a position are of the token after it, so they are taken from the positions
``Request.logits_from`` to the prompt's last but one; the last one's are what output is drawn from.
What is known stays known when a sequence is preempted or a step fails: only positions after it
keep a sequence from taking blocks that another computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchinfer.engine.step import Float32, Int32, ScoredTokens, StepResult

if TYPE_CHECKING:
    from batchinfer.engine.request import Request
    from batchinfer.engine.schedule import Schedule
    from batchinfer.engine.sequence import RequestState
    from batchinfer.engine.table import SequenceTable


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Of the last N tokens of a prompt, in order, from the model's unmodified logits."""

    logprobs: Float32  # [N]
    ranks: Int32  # [N] 1 = most likely
    top_token_ids: Int32  # [N, L] best first
    top_logprobs: Float32  # [N, L]


class PromptScores:
    """What is known of a row's prompt, from its beginning on."""

    def __init__(self, request: Request) -> None:
        assert request.params.prompt_logprobs is not None
        self.num_top = request.params.prompt_logprobs
        """Alternatives wanted for each token."""
        self.next = request.logits_from
        """The first position whose logits are not known."""
        self.stop = request.num_prompt_tokens - 1
        """The first position that none are wanted of."""
        self.nonfinite = False
        """Whether logits held NaN or +inf."""
        self._known: list[StepResult] = []

    def take(self, start: int, result: StepResult) -> None:
        """Take what a step gave for the positions from ``start`` on; some may be known."""
        new = np.arange(len(result.logprobs)) >= self.next - start
        assert start <= self.next, "logits of a position were passed over"
        self.next += int(new.sum())
        self.nonfinite |= bool(result.nonfinite[new].any())
        self._known.append(result.only(new))

    def logprobs(self) -> PromptLogprobs:
        """All that is known; call it when that is all that was wanted."""
        assert self.next >= self.stop
        floats, ints = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int32)
        logprobs, ranks = [floats], [ints]
        top_ids = [np.empty((0, self.num_top), dtype=np.int32)]
        top_logprobs = [np.empty((0, self.num_top), dtype=np.float32)]
        for result in self._known:
            assert result.ranks is not None
            assert result.top_token_ids is not None
            assert result.top_logprobs is not None
            logprobs.append(result.logprobs)
            ranks.append(result.ranks)
            top_ids.append(result.top_token_ids[:, : self.num_top])
            top_logprobs.append(result.top_logprobs[:, : self.num_top])
        return PromptLogprobs(
            np.concatenate(logprobs),
            np.concatenate(ranks),
            np.concatenate(top_ids),
            np.concatenate(top_logprobs),
        )


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Neighbouring positions of one prompt whose logits a step takes."""

    state: RequestState
    start: int
    stop: int
    packed: int
    """Where in the step's row of tokens the first of them is."""


def scored_spans(table: SequenceTable, schedule: Schedule) -> list[ScoredSpan]:
    """What a step is to tell of prompts. Call it before its tokens count as computed."""
    rows, num_new = schedule.rows, schedule.num_new
    computed = table.num_computed[rows]
    asking = table.scores_prompt[rows] & (computed < table.num_prompt[rows] - 1)
    if not asking.any():
        return []
    starts, spans = np.cumsum(num_new) - num_new, []
    for at in np.flatnonzero(asking):
        state, first = table.sequence(rows[at]).state, int(computed[at])
        assert state.scores is not None
        start = max(first, state.scores.next)
        stop = min(first + int(num_new[at]), state.scores.stop)
        if start < stop:
            spans.append(ScoredSpan(state, start, stop, int(starts[at]) + start - first))
    return spans


def scored_tokens(spans: list[ScoredSpan]) -> ScoredTokens | None:
    """The same as a step has it; None where there is nothing."""
    if not spans:
        return None
    lengths = [span.stop - span.start for span in spans]
    wanted = [0 if span.state.scores is None else span.state.scores.num_top for span in spans]
    return ScoredTokens(
        rows=np.concatenate(
            [np.arange(s.packed, s.packed + s.stop - s.start, dtype=np.int32) for s in spans]
        ),
        token_ids=np.concatenate(
            [s.state.request.prompt_token_ids[s.start + 1 : s.stop + 1] for s in spans]
        ),
        num_logprobs=np.repeat(np.asarray(wanted, dtype=np.int32), lengths),
    )


def take_back_scores(spans: list[ScoredSpan], result: StepResult | None) -> None:
    """Give every prompt what a step told of it.

    Args:
        spans: of the step, in its order.
        result: of the tokens of ``scored_tokens``, one after the other.
    """
    at = 0
    for span in spans:
        assert result is not None
        assert span.state.scores is not None
        end = at + span.stop - span.start
        span.state.scores.take(span.start, result.only(slice(at, end)))
        at = end
