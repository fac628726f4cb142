"""Collects the tokens of unfinished rows from the engine, and returns kept tokens to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count, takewhile

from batchinfer.console.meter import Counts
from batchinfer.console.progress_bar import Progress
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.output_tracker import OutputIncrement, OutputTracker
from batchinfer.engine.request import Completion, PartialOutput, Request
from batchinfer.engine.sequence import RequestState
from batchinfer.errors import JobError
from batchinfer.job.tokens.resume_pace import ResumePace, RunPace
from batchinfer.job.tokens.token_tables import KeptOutput, RequestId

_FLUSH_SHARE = 0.8
"""Share of ``most_lost_s`` after which tokens are flushed. The remaining time is for the running
step and for writing the file."""
_LEAST_EVERY_S = 1.0
"""Seconds between flushes at the start of a run, so that a run that is killed soon after its start
loses little work."""
ALONE_S = 1.0
"""Seconds between flushes while a row runs alone because it may have killed earlier runs. Tokens
that are kept after such a run show that the row did not kill the run. If tokens were flushed at
once, a row that kills every run after one step would keep one more token in each run, and would
never be given up."""
_MOST_OBSOLETE_TOKENS = 1 << 21
"""Maximum number of obsolete tokens on disk. Beyond this number, all tokens in use are written to a
new file, which replaces the older files."""
_FILE_COST_TOKENS = 1 << 12
"""Cost of writing a file, as a number of tokens. If rows draw few tokens, this cost limits the
number of files to a few hundred.
"""


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    increments: Sequence[OutputIncrement]
    replaces_all: bool
    """True if the increments hold all tokens in use, so that older files can be deleted."""
    pace: RunPace
    """Age of the run, and the time of its steps."""


class TokensInFlight:
    """An ``OutputObserver`` that hands over new tokens of unfinished rows every few seconds, and
    returns the tokens that earlier runs kept.

    From time to time the observer hands over all tokens in use, and the new file replaces the older
    files. The token files therefore hold at most about twice the tokens of unfinished rows, and
    each drawn token is written about twice.

    Args:
        most_lost_s: seconds of work that a crash may lose.
        kept: tokens that earlier runs kept.
    """

    def __init__(
        self,
        most_lost_s: float,
        progress: Progress,
        kept: Mapping[RequestId, KeptOutput],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s = _FLUSH_SHARE * most_lost_s
        self._progress = progress
        self._kept = dict(kept)
        self.pace = ResumePace(self._num_kept, clock)
        self._clock = clock
        self._flushed_at = clock()
        self._drawn_at: float | None = None
        """Time of the first token since the last flush."""
        self.is_row_alone = False
        """True while the engine runs a single row."""
        self._tracker = OutputTracker()
        self._states: Collection[RequestState] = ()
        self._just_ended: dict[int, list[Completion]] = {}
        """Completions of the last step, keyed by row id; the rows may get further requests."""
        self._ended: dict[int, list[Completion]] = {}
        """Earlier completions, keyed by row id, of rows that have further requests."""
        self._cost = math.inf  # the first update replaces the files of earlier runs
        """Cost in tokens of the updates since the last update that replaced all files."""

    def add(self, kept: Mapping[RequestId, KeptOutput]) -> None:
        """Add tokens that other writers kept, before the engine gets the tokens' requests."""
        self._kept.update(kept)

    @contextmanager
    def observing(
        self, engine: Engine | EncoderEngine, hand_over: Callable[[TokenUpdate], None]
    ) -> Iterator[None]:
        """Observe an engine, and hand over the last tokens at the end or after a ``JobError``."""
        engine.observer, self._hand_over = self, hand_over
        try:
            yield
        except JobError:
            with suppress(JobError):  # the first error is more important
                self._flush([], is_ending=True)
            raise
        else:
            self._flush([], is_ending=True)
        finally:
            engine.observer = None

    def partial_output(self, request: Request) -> PartialOutput | None:
        """Return the output that an earlier run kept for a new request; None if it kept none."""
        if request.number and request.row_id in self._just_ended:
            self._ended[request.row_id] = self._just_ended.pop(request.row_id)
        kept = self._kept.pop((request.row_id, request.number), None)
        if kept is None or kept.key != request.key:
            return None
        self._progress.update(Counts(kept_tokens=kept.num_drawn(request)), None)
        return kept.partial()

    def _num_kept(self, row_id: int) -> int:
        outputs = map(self._kept.get, ((row_id, number) for number in count()))
        return sum(kept.num_tokens for kept in takewhile(bool, outputs) if kept)

    def stepped(
        self, states: Collection[RequestState], ended: Sequence[Completion], output_tokens: int
    ) -> None:
        """Hand over the tokens drawn since the last flush, if enough time has passed since then."""
        self._states, self._just_ended = states, {}
        for completion in ended:
            if completion.error_code is None:
                row_id = completion.request.row_id
                self._just_ended[row_id] = [*self._ended.pop(row_id, ()), completion]
        if self._is_due(output_tokens):
            self._flush(list(self._just_ended.values()))

    def _is_due(self, num_drawn: int) -> bool:
        now = self._clock()
        if num_drawn and self._drawn_at is None:
            self._drawn_at = now
        if self.is_row_alone:
            every_s = min(self._every_s, ALONE_S)
            return self._drawn_at is not None and now - self._drawn_at >= every_s
        every_s = min(self._every_s, max(_LEAST_EVERY_S, self.pace.age_s / 8))
        return now - self._flushed_at >= every_s

    def _flush(self, just_ended: Sequence[list[Completion]], *, is_ending: bool = False) -> None:
        self._flushed_at, self._drawn_at = self._clock(), None
        ended = [*chain.from_iterable((*self._ended.values(), *just_ended))]
        increments = self._tracker.take(self._states, ended)
        needed = self._tracker.num_tokens + sum(kept.num_tokens for kept in self._kept.values())
        is_wasteful = bool(increments) and self._cost > 2 * needed + _MOST_OBSOLETE_TOKENS
        replaces_all = is_wasteful or not needed
        if replaces_all:
            increments = self._tracker.take(self._states, ended, report_all=True)
            increments += [kept.whole(id) for id, kept in self._kept.items() if kept.num_tokens]
            self._cost = 0
        if increments:
            samples = [sample for increment in increments for _, sample in increment.samples]
            self._cost += _FILE_COST_TOKENS + sum(len(sample.token_ids) for sample in samples)
        pace = self.pace.pace(is_ending=is_ending)
        self._hand_over(TokenUpdate(increments, replaces_all, pace))
