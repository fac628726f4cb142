"""The engine: requests in, completions out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from batchinfer.engine.request import Completion, Request
from batchinfer.engine.scheduler import Schedule, Scheduler
from batchinfer.engine.sequence import RequestState, Sequence
from batchinfer.engine.stats import StepStats, note_tokens, step_stats
from batchinfer.engine.step import Step, StepResult
from batchinfer.engine.step_builder import build_step, sampled_rows
from batchinfer.engine.take_back import take_back


class Runner(Protocol):
    """Whatever computes a step: the worker, or a stand-in in tests."""

    def run(self, step: Step) -> StepResult:
        """Compute the step and draw its samples."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step finished, and what it took; no stats when there was nothing to run."""

    completions: list[Completion]
    stats: StepStats | None


class Engine:
    """Schedules requests over a runner.

    A step is three calls: schedule, run, take back.

    Args:
        scheduler: queue, sequence table and block pool.
        runner: computes the steps.
        clock: seconds, for statistics only.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._num_steps = 0
        self._first_step_at: float | None = None
        self._refused: list[Completion] = []
        self._num_unfinished = 0

    @property
    def num_running(self) -> int:
        """Sequences with blocks in the pool."""
        return self.scheduler.table.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self.scheduler.waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests added and not yet handed back."""
        return self._num_unfinished

    def add_request(self, request: Request) -> None:
        """Queue a request. One that can never run is handed back by the next step, as an error."""
        self._num_unfinished += 1
        refusal = self._refusal(request)
        if refusal is not None:
            code, message = refusal
            self._refused.append(Completion(request, [], code, message))
            return
        state = RequestState(request, self._clock())
        state.live.append(Sequence(state, 0))
        self.scheduler.add(state.live[0])

    def abort_all(self) -> None:
        """Forget every unfinished request, and whatever a step that failed was to fill."""
        self.scheduler.abort_all()
        self._refused.clear()
        self._num_unfinished = 0

    def step(self) -> StepOutcome:
        """Run one step."""
        began = self._clock()
        if self._first_step_at is None:
            self._first_step_at = began
        completions, self._refused = self._refused, []
        schedule = self.scheduler.schedule()
        stats = None
        if schedule is not None:
            finished, stats = self._run(schedule, began)
            completions.extend(finished)
        self._num_unfinished -= len(completions)
        return StepOutcome(completions, stats)

    def _run(self, schedule: Schedule, began: float) -> tuple[list[Completion], StepStats]:
        scheduler = self.scheduler
        table = scheduler.table
        tokens = note_tokens(table, schedule, began)
        rows, copies = sampled_rows(table, schedule)
        result = self._runner.run(build_step(table, schedule, rows, copies))
        scheduler.advance(schedule)
        stats = step_stats(scheduler, schedule, tokens, self._num_steps)
        completions = take_back(scheduler, rows, copies, result, self._clock())
        ended = self._clock()
        assert self._first_step_at is not None
        self._num_steps += 1
        t_s, step_ms = ended - self._first_step_at, (ended - began) * 1e3
        return completions, replace(stats, t_s=t_s, step_ms=step_ms)

    def _refusal(self, request: Request) -> tuple[str, str] | None:
        """Why a request can never run: error code and message."""
        table, pool = self.scheduler.table, self.scheduler.pool
        prompt, room = request.num_prompt_tokens, table.max_model_len
        if prompt == 0:
            return "empty_prompt", "the prompt has no tokens"
        if prompt >= room:
            return (
                "prompt_too_long",
                f"the prompt has {prompt} tokens; max_model_len {room} leaves no room for output",
            )
        # The last token is never fed back, so it needs no KV.
        kv_tokens = min(prompt + request.params.max_tokens, room) - 1
        blocks = -(-kv_tokens // pool.block_size)
        if blocks > pool.num_blocks:
            return (
                "does_not_fit",
                f"one sample may need {blocks} KV blocks, the pool has {pool.num_blocks}; "
                "raise engine.kv_cache_memory or lower sampling.max_tokens",
            )
        return None
