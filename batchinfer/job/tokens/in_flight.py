"""Tokens of unfinished rows on their way from the engine to files, and back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from batchinfer.console.meter import Counts
from batchinfer.console.progress import Progress
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.output_tracker import OutputIncrement, OutputTracker
from batchinfer.engine.request import Completion, PartialOutput, Request
from batchinfer.engine.sequence import RequestState
from batchinfer.errors import JobError
from batchinfer.job.tokens.record import KeptOutput, RequestId

_TAKEN_AFTER = 0.8
"""Share of the seconds of which tokens may be lost: the rest is for the step that runs when they
are due, and for writing them."""
ALONE_S = 1.0
"""The same of a row that runs alone, from the first token that was not taken on: it is suspected of
the deaths of earlier runs, or may be, and what it has kept tells that it was not this row that its
run died of. It is not taken at once: of a row that kills with its next step each run would keep a
token more, and it would be given up after as many deaths as it has tokens."""
_SPARED_TOKENS = 1 << 21
"""Of no use any more, before what is of use is worth writing again."""
_UPDATE_TOKENS = 1 << 12
"""What a file costs beside its tokens: so there are some hundred files at most where little is
drawn, in 40 minutes or so."""


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """What is to be kept of unfinished rows."""

    increments: Sequence[OutputIncrement]
    replaces_all: bool
    """Whether they are all that is of use: files before it may go."""


class TokensInFlight:
    """Observes an engine (see ``OutputObserver``): hands over what unfinished rows have drawn every
    few seconds, and gives rows what earlier runs have left of them.

    Every so often all of it is handed over once more, to replace what was: so there is at most
    about twice what unfinished rows hold, and what is written is about twice what is drawn.

    Args:
        most_lost_s: seconds of which tokens may be lost; they are due somewhat earlier.
        kept: what earlier runs have left.
        clock: seconds.
    """

    def __init__(
        self,
        most_lost_s: float,
        progress: Progress,
        kept: Mapping[RequestId, KeptOutput],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = _TAKEN_AFTER * most_lost_s
        self._progress = progress
        self._kept = dict(kept)
        self._clock = clock
        self._taken_at = clock()
        self._drawn_at: float | None = None
        """When the first token was drawn that was not taken."""
        self.is_row_alone = False
        """Whether the rows that run are one."""
        self._tracker = OutputTracker()
        self._states: Collection[RequestState] = ()
        self._just_ended: dict[int, list[Completion]] = {}
        """By row: of those that ended with the last step; others of their rows may follow."""
        self._ended: dict[int, list[Completion]] = {}
        """By row: of rows that others follow of."""
        self._cost = math.inf  # the first update replaces what earlier runs have left
        """Tokens of the updates since the last that replaced all."""

    def add(self, kept: Mapping[RequestId, KeptOutput]) -> None:
        """Add what others have left; called before its requests come."""
        self._kept.update(kept)

    @contextmanager
    def observing(
        self, engine: Engine | EncoderEngine, hand_over: Callable[[TokenUpdate], None]
    ) -> Iterator[None]:
        """Observe an engine; what is left at the end, also of a ``JobError``, is handed over."""
        engine.observer, self._hand_over = self, hand_over
        try:
            yield
        except JobError:
            with suppress(JobError):  # the first error says more
                self._take([])
            raise
        else:
            self._take([])
        finally:
            engine.observer = None

    def partial_output(self, request: Request) -> PartialOutput | None:
        """What an earlier run has drawn of a request that arrives."""
        if request.number and request.row_id in self._just_ended:
            self._ended[request.row_id] = self._just_ended.pop(request.row_id)
        kept = self._kept.pop((request.row_id, request.number), None)
        if kept is None or kept.key != request.key:
            return None
        self._progress.update(Counts(kept_tokens=kept.num_drawn(request)), None)
        return kept.partial()

    def stepped(
        self, states: Collection[RequestState], ended: Sequence[Completion], output_tokens: int
    ) -> None:
        """Hand over what was drawn since the last time, if that is due."""
        self._states, self._just_ended = states, {}
        for one in ended:
            if one.error_code is None:
                row_id = one.request.row_id
                self._just_ended[row_id] = [*self._ended.pop(row_id, ()), one]
        if self._is_due(output_tokens):
            self._take(list(self._just_ended.values()))

    def _is_due(self, num_drawn: int) -> bool:
        now = self._clock()
        if num_drawn and self._drawn_at is None:
            self._drawn_at = now
        if self.is_row_alone:
            every_s = min(self._every_s, ALONE_S)
            return self._drawn_at is not None and now - self._drawn_at >= every_s
        return now - self._taken_at >= self._every_s

    def _take(self, just_ended: Sequence[list[Completion]]) -> None:
        self._taken_at, self._drawn_at = self._clock(), None
        ended = [one for of_row in (*self._ended.values(), *just_ended) for one in of_row]
        increments = self._tracker.take(self._states, ended)
        needed = self._tracker.num_tokens + sum(kept.num_tokens for kept in self._kept.values())
        is_wasteful = bool(increments) and self._cost > 2 * needed + _SPARED_TOKENS
        replaces_all = is_wasteful or not needed
        if replaces_all:
            increments = self._tracker.take(self._states, ended, whole=True)
            increments += [kept.whole(of) for of, kept in self._kept.items() if kept.num_tokens]
            self._cost = 0
        if increments:
            samples = [sample for one in increments for _, sample in one.samples]
            self._cost += _UPDATE_TOKENS + sum(len(sample.token_ids) for sample in samples)
        self._hand_over(TokenUpdate(increments, replaces_all))
