"""The engine: requests in, completions out, one step at a time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from batchinfer.engine.images import LostImageError
from batchinfer.engine.oom_recovery import Recovered, recover
from batchinfer.engine.output_tracker import OutputObserver
from batchinfer.engine.request import Completion, Request, beyond_vocabulary
from batchinfer.engine.resume import begin
from batchinfer.engine.runner import OutOfMemory, Runner
from batchinfer.engine.scheduler.schedule import Schedule
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.sequence import RequestState
from batchinfer.engine.stats import StepStats
from batchinfer.engine.step_io.build_step import build_step
from batchinfer.engine.step_io.failed_step import fail_requests_with
from batchinfer.engine.step_io.finish_request import complete
from batchinfer.engine.step_io.in_flight import InFlight
from batchinfer.engine.step_io.process_result import process_result
from batchinfer.engine.step_io.shared_prefix import PrefixTree


@dataclass(slots=True)
class StepOutcome:
    completions: list[Completion]
    stats: StepStats | None = None
    """Statistics of the processed step; None if no step was processed."""
    recovered: Recovered | None = None
    """Recovery from a step that ran out of memory."""

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of the step. ``decode_tokens`` counts a token when it is fed
        back to the model. A sample's last token is never fed back, so this property counts it when
        the sample is returned."""
        last = sum(len(completion.outputs) for completion in self.completions)
        return last + (0 if self.stats is None else self.stats.decode_tokens)


class Engine:
    """Runs requests on a runner, step by step.

    With ``runs_ahead``, the engine submits a step before it processes the previous step's result,
    so the device never waits for the host. A sequence sits out a step that needs the value of a
    token whose result has not been read yet.

    Args:
        clock: returns seconds; for statistics only.
        runs_ahead: true for a runner that computes asynchronously.
        vocab_size: number of the model's token ids; None: prompts' ids are not checked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.perf_counter,
        *,
        runs_ahead: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._vocab_size = vocab_size
        self._max_tokens = scheduler.max_num_batched_tokens
        """Initial token limit of a step, for ``refusal``. Recovery from out-of-memory errors may
        lower the scheduler's limit."""
        self._prefixes = PrefixTree(scheduler.table)
        self._runner = runner
        self._clock = clock
        self._steps_ahead = int(runs_ahead)
        self._in_flight: deque[InFlight] = deque()
        self._last_read_at = -math.inf
        self._first_step_at: float | None = None
        self._ready: list[Completion] = []
        """Completions of requests that need no step."""
        self._num_arrived = 0
        self._num_unfinished = 0
        self._states: dict[Request, RequestState] = {}
        self.observer: OutputObserver | None = None

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens in a sequence, prompt and output together."""
        return self.scheduler.table.max_model_len

    @property
    def num_running(self) -> int:
        """Number of sequences with blocks in the pool."""
        return self.scheduler.table.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were added and not returned yet."""
        return self._num_unfinished

    @property
    def states(self) -> Collection[RequestState]:
        return self._states.values()

    def add_request(self, request: Request) -> None:
        """Queue a request. If the request can never run, the next step returns its error.

        A request continues from its ``partial_output`` if that output contains every sample and
        value that the request needs; else the request restarts.
        """
        self._num_unfinished += 1
        partial = None if self.observer is None else self.observer.partial_output(request)
        if partial is not None:
            request = replace(request, partial_output=partial)
        refusal = self.refusal(request)
        if refusal is not None:
            code, message = refusal
            self._ready.append(Completion(request, [], code, message))
            return
        room = self.scheduler.table.max_model_len
        state, sequences = begin(request, self._clock(), self._num_arrived, room)
        self._num_arrived += 1
        if not sequences:
            state.admitted_at = state.first_token_at = state.arrived_at
            self._ready.append(complete(state, None, state.arrived_at))
            return
        self._states[state.request] = state
        for sequence in sequences:
            self.scheduler.add(sequence)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes. Requires that all requests are finished."""
        assert not self._num_unfinished, "requests are unfinished"
        self.scheduler.pool.evict_all()

    def abort_all(self) -> None:
        """Drop every unfinished request and the results of steps in flight."""
        self.scheduler.abort_all()
        self._in_flight.clear()
        self._ready.clear()
        self._states.clear()
        self._num_unfinished = 0

    def step(self) -> StepOutcome:
        """Submit a step, then process its result or, with ``runs_ahead``, the previous result.

        If a step runs out of memory, later, smaller steps compute its tokens. If an image of a step
        can no longer be loaded, the requests with this image fail with ``invalid_image``.

        Raises:
            DeviceError: the device does not have enough memory for the smallest step.
        """
        began = self._clock()
        if self._first_step_at is None:
            self._first_step_at = began
        outcome = StepOutcome(self._ready)
        self._ready = []
        try:
            self._submit_and_process(outcome, began)
        except OutOfMemory as error:
            outcome.recovered = recover(self.scheduler, self._in_flight, error)
            self._in_flight.clear()
        except LostImageError as error:
            outcome.completions += fail_requests_with(
                self.scheduler, self._states.values(), error, self._clock()
            )
        self._num_unfinished -= len(outcome.completions)
        for completion in outcome.completions:
            self._states.pop(completion.request, None)
        if self.observer is not None:
            self.observer.stepped(self.states, outcome.completions, outcome.output_tokens)
        return outcome

    def _submit_and_process(self, outcome: StepOutcome, began: float) -> None:
        completions = outcome.completions
        schedule = self.scheduler.schedule()
        if schedule is None and self._in_flight:
            outcome.stats = self._process(completions)
            schedule = self.scheduler.schedule()
        if schedule is not None:
            try:
                self._in_flight.append(self._submit(schedule, began))
            except (OutOfMemory, LostImageError):
                if self._in_flight:  # the previous step succeeded
                    outcome.stats = self._process(completions)
                raise
        if len(self._in_flight) > self._steps_ahead:
            outcome.stats = self._process(completions)
        if self._num_unfinished == len(completions) and self._in_flight:
            # All sequences of the step in flight are finished, so its statistics are not needed.
            self._process(completions)

    def _submit(self, schedule: Schedule, began: float) -> InFlight:
        """Submit a step. The scheduler then counts the step's tokens as computed."""
        built = build_step(self.scheduler.table, schedule, self._prefixes)
        pending = self._runner.submit(built.step)
        stats = self.scheduler.advance(schedule, began)
        if images := built.step.images:
            stats = replace(
                stats,
                images=len({each.image.number for each in images}),
                image_tokens=sum(len(each.indices) for each in images),
            )
        return InFlight(pending, built.sampled, built.scored, stats, began)

    def _process(self, completions: list[Completion]) -> StepStats:
        """Process the result of the oldest step in flight. A failed step stays in flight."""
        step = self._in_flight[0]
        result = step.pending.result()
        self._in_flight.popleft()
        completions.extend(process_result(self.scheduler, step, result, self._clock()))
        began, self._last_read_at = max(step.began, self._last_read_at), self._clock()
        seconds, stats = self._last_read_at - began, step.stats
        self.scheduler.preemption_policy.observe(seconds, stats.prefill_tokens, stats.decode_tokens)
        assert self._first_step_at is not None
        return replace(
            stats,
            t_s=self._last_read_at - self._first_step_at,
            step_ms=seconds * 1e3,
            images_encoded=result.images_encoded,
            encode_ms=result.encode_ms,
        )

    def refusal(self, request: Request) -> tuple[str, str] | None:
        """Return the error code and message for a request that can never run, else None."""
        table, pool = self.scheduler.table, self.scheduler.pool
        prompt, room = request.num_prompt_tokens, table.most_tokens(request)
        if prompt == 0:
            return "empty_prompt", "the prompt has no tokens"
        if prompt >= room:
            return (
                "prompt_too_long",
                f"the prompt has {prompt} tokens, but max_model_len is {room}, so there is no room "
                "for output",
            )
        beyond = beyond_vocabulary(request, self._vocab_size)
        if beyond is not None:
            return beyond
        if request.params.prompt_logprobs is not None and request.prompt_token_ids.min() < 0:
            return (
                "bad_sampling_params",
                "prompt_logprobs cannot be combined with images or prompt_embeds, whose "
                "tokens have no probability",
            )
        # The last token is never fed back to the model, so it needs no KV.
        kv_tokens = min(prompt + request.params.max_tokens, room) - 1
        if request.params.beam_width:
            return self.scheduler.beam_groups.refusal(request, -(-kv_tokens // pool.block_size))
        blocks = pool.window_slots.most_slots(kv_tokens, min(kv_tokens, self._max_tokens))
        blocks += pool.states.slots_per_state
        if blocks > pool.num_blocks:
            lower = " or lower sampling.max_tokens" if pool.windows else ""
            return (
                "does_not_fit",
                f"one sample may need {blocks} KV blocks, but the pool has {pool.num_blocks}; "
                f"raise engine.kv_cache_memory{lower}",
            )
        return None
