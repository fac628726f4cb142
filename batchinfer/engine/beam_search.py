"""Beam search for one row: chooses which beams continue, and when the search ends.

It follows the rules of transformers' ``generate(num_beams=..., early_stopping=False)``
(transformers/generation/utils.py, ``_beam_search``). This module does not depend on blocks or table
rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.engine.request import Request, SampleOutput
from batchinfer.engine.step import Float32, Int32


class Beam(Protocol):
    output_ids: list[int]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: a current beam plus one token."""

    beam: int
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float


class BeamSearch:
    """The beam search of one row, with W = ``beam_width``.

    A candidate is a beam plus one token. If a candidate among the W best of a step ends the text,
    it becomes a finished hypothesis. The W best candidates that do not end it become the next
    beams. The score of a hypothesis is cumulative log-probability / length ** ``length_penalty``,
    where the length is its number of output tokens, including the end token. The search keeps the W
    best hypotheses. It ends when it has W hypotheses and the best of the next beams, scored at its
    current length, does not beat the worst hypothesis. It also ends at the maximum length, where
    all candidates end.
    """

    __slots__ = ("_request", "_stop_ids", "finished")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stop_ids = frozenset(request.beam_end_ids)
        self.finished: list[Hypothesis] = []
        """The W best hypotheses so far, best first."""

    def advance(
        self, beams: Items[Beam], token_ids: Int32, logprobs: Float32, *, at_limit: bool
    ) -> list[Continuation]:
        """Choose the beams of the next step.

        Args:
            beams: the B running beams, of equal length.
            token_ids: [B, C] each beam's most likely next tokens, best first; C is
                ``request.num_candidates``, or the vocabulary size if that is smaller.
            logprobs: [B, C] log-probabilities of ``token_ids``; -inf for impossible tokens.
            at_limit: true if the next token reaches the maximum length.

        Returns:
            The beams of the next step, best first. The list is empty when the search has ended.
        """
        width, length = self._request.group_size, len(beams[0].output_ids) + 1
        before = np.array([beam.cumulative_logprob for beam in beams])
        totals = (before[:, None] + logprobs).ravel()
        best_first = np.argsort(-totals, kind="stable").tolist()
        running: list[Continuation] = []
        for rank, at in enumerate(best_first):
            if len(running) == width or totals[at] == -np.inf:
                break
            beam, total = at // token_ids.shape[1], float(totals[at])
            token = int(token_ids.flat[at])
            if not (at_limit or token in self._stop_ids):
                running.append(Continuation(beam, token, total))
            elif rank < width:
                ids = [*beams[beam].output_ids, token]
                self.finished.append(Hypothesis(ids, total, self._score(total, length)))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[width:]
        if len(self.finished) == width and running:
            best = self._score(running[0].cumulative_logprob, length)
            if best <= self.finished[-1].score:
                return []
        return running

    def outputs(self) -> list[SampleOutput]:
        """Return the ``n`` best hypotheses, best first."""
        return [
            self._output(rank, hypothesis)
            for rank, hypothesis in enumerate(self.finished[: self._request.params.n])
        ]

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return float(cumulative_logprob / length**self._request.params.length_penalty)

    def _output(self, rank: int, hypothesis: Hypothesis) -> SampleOutput:
        last = hypothesis.token_ids[-1]
        stopped = last in self._stop_ids
        return SampleOutput(
            index=rank,
            token_ids=np.asarray(hypothesis.token_ids, dtype=np.int32),
            finish_reason="stop" if stopped else "length",
            stop_reason=self._request.named_stop(last) if stopped else None,
            stop_match=None,
            cumulative_logprob=hypothesis.cumulative_logprob,
            logprobs=None,
            score=hypothesis.score,
        )
