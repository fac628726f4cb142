"""Adds prompt tokens to score to a step, and stores their log-probabilities with the prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.engine.scheduler.schedule import Schedule
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.sequence import RequestState
from batchinfer.engine.step import Int32, LogprobsMode, ScoredTokens, StepResult


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Consecutive positions of one prompt whose logits a step computes."""

    state: RequestState
    start: int
    stop: int
    packed: int
    """Index of the span's first position in the step's packed tokens."""


def scored_spans(table: SequenceTable, schedule: Schedule) -> list[ScoredSpan]:
    """Return the spans that a step scores. Call it before ``num_computed`` includes the step."""
    rows, num_new = schedule.rows, schedule.num_new
    computed = table.num_computed[rows]
    has_scores = table.scores_prompt[rows] & (computed < table.num_prompt[rows] - 1)
    if not has_scores.any():
        return []
    starts, spans = np.cumsum(num_new) - num_new, []
    for at in np.flatnonzero(has_scores):
        state, first = table.sequence(rows[at]).state, int(computed[at])
        assert state.scores is not None
        start = max(first, state.scores.next)
        stop = min(first + int(num_new[at]), state.scores.stop)
        if start < stop:
            spans.append(ScoredSpan(state, start, stop, int(starts[at]) + start - first))
    return spans


def scored_tokens(spans: list[ScoredSpan]) -> ScoredTokens | None:
    """Return the tokens to score as arrays for a step; None if there are no spans."""
    if not spans:
        return None
    lengths = [span.stop - span.start for span in spans]
    wanted = [0 if span.state.scores is None else span.state.scores.num_top for span in spans]
    as_logits = [bool(span.state.request.logprobs_mode & LogprobsMode.LOGITS) for span in spans]
    return ScoredTokens(
        rows=np.concatenate(
            [np.arange(s.packed, s.packed + s.stop - s.start, dtype=np.int32) for s in spans]
        ),
        token_ids=np.concatenate(
            [s.state.request.prompt_token_ids[s.start + 1 : s.stop + 1] for s in spans]
        ),
        num_logprobs=np.repeat(np.asarray(wanted, dtype=np.int32), lengths),
        named_token_ids=_named_tokens(spans, sum(lengths)),
        as_logits=np.repeat(as_logits, lengths) if any(as_logits) else None,
    )


def _named_tokens(spans: list[ScoredSpan], count: int) -> Int32 | None:
    """Return each scored token's named token ids [count, W], padded with -1."""
    tables = [span.state.request.named_prompt_token_ids for span in spans]
    width = max((table.shape[1] for table in tables if table is not None), default=0)
    if width == 0:
        return None
    named, at = np.full((count, width), -1, dtype=np.int32), 0
    for span, table in zip(spans, tables, strict=True):
        length = span.stop - span.start
        if table is not None:
            first = span.start + 1 - span.state.request.scored_from
            named[at : at + length, : table.shape[1]] = table[first : first + length]
        at += length
    return named


def process_scores(spans: list[ScoredSpan], result: StepResult | None) -> None:
    """Store a step's log-probabilities of prompt tokens in their requests' ``scores``.

    Args:
        result: log-probabilities of ``scored_tokens(spans)``, in order.
    """
    at = 0
    for span in spans:
        assert result is not None
        assert span.state.scores is not None
        end = at + span.stop - span.start
        span.state.scores.take(span.start, result.only(slice(at, end)))
        at = end
