"""The engine's loop: rows in as they are wanted, steps, finished rows out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from batchinfer.console.meter import Counts
from batchinfer.console.progress import Progress
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.oom_recovery import Recovered
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.stats import StepStats
from batchinfer.errors import RowError
from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.run.dedup import RequestDeduplicator, copy_result
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.requests.requests import PromptRow

_WAIT_S = 0.1  # for rows, before looking whether to stop


class RowSource(Protocol):
    """Rows for the engine, as a ``Prefetcher`` of them has them."""

    def take(self, timeout_s: float) -> list[PromptRow] | None:
        """The next rows; None if there are none within the time, or ever again."""
        ...

    @property
    def exhausted(self) -> bool:
        """Whether all rows have been taken, and no more will come."""
        ...


@dataclass(slots=True)
class RowResult:
    """A row, and what came of its requests so far; nothing for one that could not run."""

    row: PromptRow
    completions: list[Completion]
    """In the order of the requests, once there are all."""
    num_missing: int = 0


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Rows and step of one turn of the loop, for the writing thread."""

    rows: list[RowResult]
    step: StepStats | None
    recovered: Recovered | None = None


@dataclass
class EngineLoop:
    """Keeps the engine fed until every row is finished."""

    engine: Engine | EncoderEngine
    task: LoadedTask
    """Makes a row's requests, and those that follow from what came of the others."""
    progress: Progress
    stop: Event
    max_waiting: int
    """Rows queued in the engine, so that it can look ahead; the others wait outside it."""
    admit: Callable[[list[int]], None]
    """Called with the rows that are about to be given to the engine."""

    def __post_init__(self) -> None:
        self._deduplicator = RequestDeduplicator()
        self._taken = deque[PromptRow]()
        """Rows that the engine has not got yet."""
        self._in_flight: dict[int, RowResult] = {}
        self._added = Counts()
        """What is to be told with the next step."""
        self.num_given = 0
        """Rows taken from the source and given to the engine, those that cannot run included."""

    def run(self, rows: RowSource, hand_over: Callable[[TurnResult], None]) -> bool:
        """Run ``rows`` until they are all finished, or until asked to stop.

        Returns:
            Whether all rows are finished and handed over.
        """
        complete = False
        while not complete and not self.stop.is_set():
            failed = self._feed(rows)
            if self.engine.num_unfinished or failed:
                hand_over(self._step(failed))
            else:
                # In this order: a stop is what may have ended the rows.
                complete = not self._taken and rows.exhausted and not self.stop.is_set()
        return complete

    def _feed(self, rows: RowSource) -> list[PromptRow]:
        """Queue rows in the engine; give back those that cannot run."""
        failed: list[PromptRow] = []
        while self.engine.num_waiting < self.max_waiting:
            idle = not self.engine.num_unfinished and not failed
            batch = self._take(rows, _WAIT_S if idle else 0)
            if batch is None:
                break
            failed += [row for row in batch if isinstance(row.prompt, RowError)]
            self._give([row for row in batch if not isinstance(row.prompt, RowError)])
        return failed

    def _take(self, rows: RowSource, timeout_s: float) -> list[PromptRow] | None:
        """The next rows; None if there are none within the time."""
        if not self._taken:
            self._taken.extend(rows.take(timeout_s) or ())
        count = min(BATCH_ROWS, len(self._taken))
        self.num_given += count
        return [self._taken.popleft() for _ in range(count)] or None

    def _give(self, rows: list[PromptRow]) -> None:
        self.admit([row.row_id for row in rows])
        for row in rows:
            failpoint(f"row-{row.row_id}")
        for row in self._deduplicator.leaders(rows):
            result = self._in_flight[row.row_id] = RowResult(row, [])
            self._request(result, self.task.requests(row), begun=1)

    def _request(self, result: RowResult, requests: Sequence[Request], *, begun: int = 0) -> None:
        result.num_missing = len(requests)
        for request in requests:
            self.engine.add_request(request)
        most_tokens = sum(map(self._most_tokens, requests))
        if most_tokens or begun:
            read = sum(request.num_prompt_tokens for request in requests)
            self._added += Counts(begun=begun, most_tokens=most_tokens, prompt_tokens=read)

    def _step(self, failed: list[PromptRow]) -> TurnResult:
        done = [RowResult(row, []) for row in failed]
        if not self.engine.num_unfinished:
            self._tell(Counts(rows=len(done)), None)
            return TurnResult(done, None)
        outcome = self.engine.step()
        for completion in outcome.completions:
            done += self._finished_by(completion)
        self._tell(Counts(rows=len(done), tokens=outcome.output_tokens), outcome.stats)
        return TurnResult(done, outcome.stats, outcome.recovered)

    def _tell(self, counts: Counts, stats: StepStats | None) -> None:
        if stats is not None:
            counts += Counts(prefill_tokens=stats.prefill_tokens, preemptions=stats.num_preempted)
        self.progress.update(self._added + counts, stats)
        self._added = Counts()

    def _most_tokens(self, request: Request) -> int:
        """Most tokens that a request may draw."""
        room = self.engine.max_model_len - request.num_prompt_tokens
        each = max(0, min(request.params.max_tokens, room))
        return each * (request.params.beam_width or request.params.n)

    def _finished_by(self, completion: Completion) -> list[RowResult]:
        """The row whose last completion this is, if it is one, and the equal rows that waited."""
        row_id = completion.request.row_id
        result = self._in_flight[row_id]
        result.completions.append(completion)
        result.num_missing -= 1
        if result.num_missing:
            return []
        result.completions.sort(key=lambda one: one.request.number)
        self._request(result, self.task.follow_up_requests(result.row, result.completions))
        if result.num_missing:
            return []
        del self._in_flight[row_id]
        drawn = sum(map(_drawn_tokens, result.completions))
        self._added += Counts(ended=1, settled_tokens=drawn)
        waited = self._deduplicator.release(row_id)
        return [result, *(RowResult(row, copy_result(row, result.completions)) for row in waited)]


def _drawn_tokens(completion: Completion) -> int:
    """Tokens drawn for a request, those of beams that were not kept included."""
    lengths = [len(output.token_ids) for output in completion.outputs]
    beams = completion.request.params.beam_width
    return beams * max(lengths, default=0) if beams else sum(lengths)
