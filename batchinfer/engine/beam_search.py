"""Beam search for one row: chooses which beams continue, and when the search ends.

The search follows transformers' ``generate(num_beams=..., early_stopping=False)``
(transformers/generation/utils.py, ``_beam_search``).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from batchinfer.engine.request import Request, SampleOutput, TokenLogprobs
from batchinfer.engine.step import Float32, Int32
from batchinfer.protocols import StopChecker, StopMatch


class Beam(Protocol):
    output_ids: list[int]
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    stop_checker: StopChecker | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: a current beam plus one token."""

    beam: int
    token_id: int
    cumulative_logprob: float
    logprobs: list[TokenLogprobs] | None
    stop_checker: StopChecker | None
    """Searches the continuation for stop strings; it has seen the token."""


class BeamSearch:
    """The beam search of one row, with W = ``beam_width``.

    A candidate is a beam plus one token. A stop token or a stop string ends the text. If a
    candidate among the W best of a step ends the text, the candidate becomes a finished hypothesis.
    The W best candidates that do not end it become the next beams. The score of a hypothesis is
    cumulative log-probability / length ** ``length_penalty``, where the length is its number of
    output tokens, including the token that ended it. The search keeps the W best hypotheses. The
    search ends when W hypotheses exist and the best of the next beams, scored at its current
    length, does not beat the worst hypothesis. The search also ends at the maximum length, where
    all candidates end.
    """

    __slots__ = ("_request", "_stop_ids", "finished")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stop_ids = frozenset(request.beam_end_ids)
        self.finished: list[SampleOutput] = []
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
        best_first = np.argsort(-totals, kind="stable")[: self._request.num_beam_candidates]
        running: list[Continuation] = []
        for rank, at in enumerate(best_first.tolist()):
            if len(running) == width or totals[at] == -np.inf or (at_limit and rank == width):
                break
            number, place = divmod(at, token_ids.shape[1])
            beam, token, total = beams[number], int(token_ids[number, place]), float(totals[at])
            checker = None if beam.stop_checker is None else beam.stop_checker.fork()
            stop = self._stop(token, checker, length)
            ended = at_limit or stop is not None
            if ended and rank >= width:
                continue
            entries = None
            if beam.logprobs is not None:
                entries = [*beam.logprobs, self._entry(token_ids[number], logprobs[number], place)]
            if ended:
                ids = [*beam.output_ids, token]
                self.finished.append(self._hypothesis(ids, total, entries, stop))
            else:
                running.append(Continuation(number, token, total, entries, checker))
        self.finished.sort(key=lambda hypothesis: -_score(hypothesis))
        del self.finished[width:]
        if len(self.finished) == width and running:
            best = self._score(running[0].cumulative_logprob, length)
            if best <= _score(self.finished[-1]):
                return []
        return running

    def outputs(self) -> list[SampleOutput]:
        """Return the ``n`` best hypotheses, best first."""
        best = self.finished[: self._request.params.n]
        return [replace(hypothesis, index=rank) for rank, hypothesis in enumerate(best)]

    def _stop(self, token: int, checker: StopChecker | None, length: int) -> int | StopMatch | None:
        """Return the stop token or stop string that ends a candidate with this token, if any."""
        if token in self._stop_ids:
            return token
        may_stop = length >= self._request.params.min_tokens
        return None if checker is None else checker.on_token(token, may_stop=may_stop)

    def _entry(self, token_ids: Int32, logprobs: Float32, place: int) -> TokenLogprobs:
        """Return the log-probability entry for candidate ``place`` of one beam.

        Args:
            token_ids: [C] candidates, best first.
            logprobs: [C].
        """
        count = self._request.params.logprobs
        return TokenLogprobs(
            token_id=int(token_ids[place]),
            logprob=float(logprobs[place]),
            rank=1 + int((logprobs > logprobs[place]).sum()),
            top=tuple(zip(token_ids[:count].tolist(), logprobs[:count].tolist(), strict=True)),
        )

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return float(cumulative_logprob / length**self._request.params.length_penalty)

    def _hypothesis(
        self,
        token_ids: list[int],
        cumulative_logprob: float,
        logprobs: list[TokenLogprobs] | None,
        stop: int | StopMatch | None,
    ) -> SampleOutput:
        match = stop if isinstance(stop, StopMatch) else None
        named = self._request.named_stop(stop) if isinstance(stop, int) else None
        return SampleOutput(
            index=0,  # ``outputs`` sets the rank
            token_ids=np.asarray(token_ids, dtype=np.int32),
            finish_reason="length" if stop is None else "stop",
            stop_reason=named if match is None else match.stop,
            stop_match=match,
            cumulative_logprob=cumulative_logprob,
            logprobs=logprobs,
            score=self._score(cumulative_logprob, len(token_ids)),
        )


def _score(hypothesis: SampleOutput) -> float:
    assert hypothesis.score is not None
    return hypothesis.score
