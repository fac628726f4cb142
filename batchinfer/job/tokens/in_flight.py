"""The engine's side of tokens in flight: when they are taken, and which requests bring some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from batchinfer.engine.output_tracker import OutputIncrement, OutputTracker
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.sequence import RequestState
from batchinfer.job.tokens.kept_outputs import KeptOutput
from batchinfer.job.tokens.request_key import request_key

_TAKEN_AFTER = 0.8
"""Share of the seconds of which tokens may be lost: the rest is for the step that runs when they
are due, and for writing them."""
ALONE_S = 1.0
"""The same of a row that runs alone, from the first token that was not taken on: it is suspected of
the deaths of earlier runs, or may be, and what it has kept tells that it was not this row that its
run died of. It is not taken at once: of a row that kills with its next step each run would keep a
token more, and it would be given up after as many deaths as it has tokens."""


class TokensInFlight:
    """Tokens of unfinished rows on their way from the engine to files, and back.

    Args:
        most_lost_s: seconds of which tokens may be lost; they are due somewhat earlier.
        kept: what earlier runs have left, by ``request_key``.
        clock: seconds.
    """

    def __init__(
        self,
        most_lost_s: float,
        kept: dict[bytes, KeptOutput] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = _TAKEN_AFTER * most_lost_s
        self._kept = {} if kept is None else kept
        self._clock = clock
        self._taken_at = clock()
        self._drawn_at: float | None = None
        """When the first token was drawn that was not taken."""
        self.is_row_alone = False
        """Whether the rows that run are one."""
        self._tracker = OutputTracker()

    def are_due(self, num_drawn: int) -> bool:
        """Whether to take tokens after a step that has drawn so many."""
        now = self._clock()
        if num_drawn and self._drawn_at is None:
            self._drawn_at = now
        if self.is_row_alone:
            every_s = min(self._every_s, ALONE_S)
            return self._drawn_at is not None and now - self._drawn_at >= every_s
        return now - self._taken_at >= self._every_s

    def add(self, kept: dict[bytes, KeptOutput]) -> None:
        """Add what others have left, by ``request_key``; called before its requests come."""
        self._kept.update(kept)

    def resumed(self, request: Request) -> Request:
        """The request with what an earlier run has left of it, if it has."""
        if not self._kept:
            return request
        output = self._kept.pop(request_key(request), None)
        return request if output is None else replace(request, partial_output=output.partial())

    def take(
        self, states: Iterable[RequestState], completions: Iterable[Completion]
    ) -> list[OutputIncrement]:
        """What was drawn since the last time; see ``OutputTracker``."""
        self._taken_at, self._drawn_at = self._clock(), None
        return self._tracker.take(states, completions)
