"""The loop that feeds rows to the engine, runs its steps, and collects finished rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Event

from batchinfer.console.meter import Counts
from batchinfer.console.progress_bar import Progress
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.oom_recovery import Recovered
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.stats import StepStats
from batchinfer.errors import RowError
from batchinfer.job.input.format import BATCH_ROWS
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.run.dedup import RequestDeduplicator, copy_result
from batchinfer.job.run.threads import Prefetcher
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.job.tokens.resume_pace import ResumePace
from batchinfer.requests.requests import PromptRow

_WAIT_S = 0.1  # longest wait for rows before ``stop`` is checked again


@dataclass(slots=True)
class RowResult:
    """A row and its completions so far; a row that cannot run has no completions."""

    row: PromptRow
    completions: list[Completion]
    """Completions so far; in the order of the requests once all requests are finished."""
    num_missing: int = 0


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Finished rows and step statistics of one turn of the loop, for the writing thread."""

    rows: list[RowResult]
    step: StepStats | None
    recovered: Recovered | None = None


@dataclass
class EngineLoop:
    """Keeps the engine fed until every row is finished."""

    engine: Engine | EncoderEngine
    task: LoadedTask
    """Makes a row's requests, and further requests that depend on their completions."""
    progress: Progress
    stop: Event
    max_waiting: int
    """Maximum number of rows in the engine's queue, which lets the engine look ahead."""
    admit: Callable[[list[int]], None]
    """Called with the ids of rows that are about to be given to the engine."""
    pace: ResumePace
    """Limits how many interrupted rows are resumed at once."""

    def __post_init__(self) -> None:
        self._deduplicator = RequestDeduplicator()
        self._taken = deque[PromptRow]()
        """Rows to give to the engine, in order."""
        self._in_flight: dict[int, RowResult] = {}
        self._added = Counts()
        self.num_given = 0
        """Number of rows given to the engine so far, including rows that cannot run."""
        self.num_finished = 0
        """Number of finished rows so far, including rows that cannot run."""

    def run(
        self, rows: Prefetcher[list[PromptRow]], hand_over: Callable[[TurnResult], None]
    ) -> bool:
        """Run ``rows``; return True once all are finished, False if the run was stopped first."""
        complete = False
        while not complete and not self.stop.is_set():
            failed = self._feed(rows)
            if self.engine.num_unfinished or failed:
                hand_over(self._step(failed))
            else:
                # Check ``stop`` last: a stop also ends ``rows``, which then seem to be exhausted.
                complete = not self._taken and rows.exhausted and not self.stop.is_set()
        return complete

    def _feed(self, rows: Prefetcher[list[PromptRow]]) -> list[PromptRow]:
        failed: list[PromptRow] = []
        while self.engine.num_waiting < self.max_waiting:
            idle = not self.engine.num_unfinished and not failed
            batch = self._take(rows, _WAIT_S if idle else 0)
            if batch is None:
                break
            failed += [row for row in batch if isinstance(row.prompt, RowError)]
            self._give([row for row in batch if not isinstance(row.prompt, RowError)])
        return failed

    def _take(self, rows: Prefetcher[list[PromptRow]], timeout_s: float) -> list[PromptRow] | None:
        if not self._taken:
            self._taken.extend(rows.take(timeout_s) or ())
        num_running = self.engine.num_running + self.engine.num_waiting
        count = self.pace.num_ready(islice(self._taken, BATCH_ROWS), num_running)
        if not count and self._taken and not self.engine.num_unfinished:
            count = 1  # the engine must not idle
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
            self._report(done, Counts(), None)
            return TurnResult(done, None)
        outcome = self.engine.step()
        for completion in outcome.completions:
            done += self._finished_by(completion)
        if outcome.stats is not None:
            self.pace.stepped(outcome.stats)
        self._report(done, Counts(tokens=outcome.output_tokens), outcome.stats)
        return TurnResult(done, outcome.stats, outcome.recovered)

    def _report(self, done: list[RowResult], counts: Counts, stats: StepStats | None) -> None:
        self.num_finished += len(done)
        counts += Counts(rows=len(done))
        if stats is not None:
            counts += Counts(prefill_tokens=stats.prefill_tokens, preemptions=stats.num_preempted)
        self.progress.update(self._added + counts, stats)
        self._added = Counts()

    def _most_tokens(self, request: Request) -> int:
        room = self.engine.max_model_len - request.num_prompt_tokens
        each = max(0, min(request.params.max_tokens, room))
        return each * (request.params.beam_width or request.params.n)

    def _finished_by(self, completion: Completion) -> list[RowResult]:
        """Return the row that a completion finishes, if any, and equal rows that wait for it."""
        row_id = completion.request.row_id
        result = self._in_flight[row_id]
        result.completions.append(completion)
        result.num_missing -= 1
        if result.num_missing:
            return []
        result.completions.sort(key=lambda completion: completion.request.number)
        self._request(result, self.task.follow_up_requests(result.row, result.completions))
        if result.num_missing:
            return []
        del self._in_flight[row_id]
        _drop_images(result)
        drawn = sum(map(_drawn_tokens, result.completions))
        self.pace.finished(drawn, sum(self._most_tokens(one.request) for one in result.completions))
        self._added += Counts(ended=1, settled_tokens=drawn)
        waited = self._deduplicator.release(row_id)
        return [result, *(RowResult(row, copy_result(row, result.completions)) for row in waited)]


def _drop_images(result: RowResult) -> None:
    """Drop the pixels of a finished row, because the image loader waits for their memory."""
    if result.row.images:
        result.row.images = ()
        for completion in result.completions:
            completion.request = replace(completion.request, images=())


def _drawn_tokens(completion: Completion) -> int:
    lengths = [len(output.token_ids) for output in completion.outputs]
    beams = completion.request.params.beam_width
    return beams * max(lengths, default=0) if beams else sum(lengths)
