"""An engine for encoders, which need no KV pool, blocks or shared prefixes.

In an encoder, tokens also attend to the tokens after them. Texts therefore share no computation,
and one step computes a whole text. The engine sorts waiting texts by length, longest first. Texts
of similar length thus run together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from batchinfer.engine.encoder_step import EncoderRunner, EncoderStep
from batchinfer.engine.engine import StepOutcome
from batchinfer.engine.oom_recovery import Recovered
from batchinfer.engine.output_tracker import OutputObserver
from batchinfer.engine.request import Completion, Request, RequestStats, beyond_vocabulary
from batchinfer.engine.runner import OutOfMemory
from batchinfer.engine.stats import StepStats
from batchinfer.engine.step import Float32
from batchinfer.errors import DeviceError


class EncoderEngine:
    """Runs pooling requests on an encoder; has the interface of ``Engine``.

    Args:
        max_model_len: longest text, in tokens.
        max_num_batched_tokens: maximum number of tokens in a step; a longer text runs alone.
        clock: returns seconds; for statistics only.
        vocab_size: number of the model's token ids; None: prompts' ids are not checked.
    """

    def __init__(
        self,
        runner: EncoderRunner,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        clock: Callable[[], float] = time.perf_counter,
        vocab_size: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._runner = runner
        self._max_tokens = max_num_batched_tokens
        self._max_seqs = max_num_seqs
        self._clock = clock
        self._arrived: list[tuple[Request, float]] = []
        """Requests that are not sorted yet, with their arrival times."""
        self._sorted: deque[tuple[Request, float]] = deque()
        self._refused: list[Completion] = []
        self._num_steps = 0
        self.observer: OutputObserver | None = None
        """Never called, because an encoder's requests have no partial output."""
        self._first_step_at: float | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._sorted)

    @property
    def num_running(self) -> int:
        """Always 0, because no sequence runs between steps."""
        return 0

    @property
    def num_unfinished(self) -> int:
        return self.num_waiting + len(self._refused)

    def add_request(self, request: Request) -> None:
        refusal = self.refusal(request)
        if refusal is None:
            self._arrived.append((request, self._clock()))
        else:
            self._refused.append(Completion(request, [], *refusal))

    def refusal(self, request: Request) -> tuple[str, str] | None:
        length = request.num_prompt_tokens
        if length == 0:
            return "empty_prompt", "the prompt has no tokens"
        if length > self.max_model_len:
            return "prompt_too_long", (
                f"the prompt has {length} tokens; at most {self.max_model_len} fit in max_model_len"
            )
        return beyond_vocabulary(request, self._vocab_size)

    def reset_prefix_cache(self) -> None:
        """Do nothing, because an encoder has no cache."""

    def abort_all(self) -> None:
        self._arrived.clear()
        self._sorted.clear()
        self._refused.clear()

    def step(self) -> StepOutcome:
        """Encode one batch of waiting texts.

        If the device runs out of memory, the texts return to the queue and later steps are smaller.

        Raises:
            DeviceError: the device does not have enough memory for a single text.
        """
        outcome = StepOutcome(self._refused)
        self._refused = []
        texts = self._next_texts()
        if not texts:
            return outcome
        began = self._clock()
        if self._first_step_at is None:
            self._first_step_at = began
        requests = [request for request, _ in texts]
        try:
            vectors = self._runner.encode(_step_of(requests))
        except OutOfMemory as error:
            self._sorted.extendleft(reversed(texts))
            outcome.recovered = self._recovered(requests, error)
            return outcome
        ended = self._clock()
        for (request, arrived), vector in zip(texts, vectors, strict=True):
            stats = RequestStats(
                prompt_tokens=request.num_prompt_tokens,
                queue_ms=(began - arrived) * 1e3,
                prefill_ms=(ended - began) * 1e3,
                latency_ms=(ended - arrived) * 1e3,
            )
            outcome.completions.append(_completion(request, vector, stats))
        outcome.stats = self._step_stats(requests, began, ended)
        return outcome

    def _next_texts(self) -> list[tuple[Request, float]]:
        if not self._sorted:
            self._arrived.sort(
                key=lambda entry: (entry[0].pooling, -entry[0].num_prompt_tokens, entry[0].unpooled)
            )
            self._sorted.extend(self._arrived)
            self._arrived.clear()
        texts: list[tuple[Request, float]] = []
        room = self._max_tokens
        while self._sorted and len(texts) < self._max_seqs:
            request, _ = self._sorted[0]
            fits = request.num_prompt_tokens <= room
            if texts and (not fits or request.pooling != texts[0][0].pooling):
                break
            texts.append(self._sorted.popleft())
            room -= request.num_prompt_tokens
        return texts

    def _recovered(self, requests: list[Request], error: OutOfMemory) -> Recovered:
        """Limit steps to half the tokens of the step that ran out of memory."""
        if len(requests) == 1:
            raise DeviceError(
                "the device has too little memory for the smallest step, which is "
                f"one text of {requests[0].num_prompt_tokens} tokens: {error}",
                hint="free memory that other processes use, then run again",
            )
        tokens = sum(request.num_prompt_tokens for request in requests)
        self._max_tokens = max(1, tokens // 2)
        return Recovered(str(error), 0, self._max_tokens)

    def _step_stats(self, requests: list[Request], began: float, ended: float) -> StepStats:
        assert self._first_step_at is not None
        self._num_steps += 1
        return StepStats(
            step=self._num_steps - 1,
            t_s=ended - self._first_step_at,
            step_ms=(ended - began) * 1e3,
            num_running=len(requests),
            num_waiting=self.num_waiting,
            prefill_tokens=sum(request.num_prompt_tokens for request in requests),
        )


def _step_of(requests: list[Request]) -> EncoderStep:
    lengths = np.array([request.num_prompt_tokens for request in requests], np.int32)
    return EncoderStep(
        token_ids=np.concatenate([request.prompt_token_ids for request in requests]),
        lengths=lengths,
        first_segments=np.array(
            [
                request.num_prompt_tokens
                if request.first_segment is None
                else request.first_segment
                for request in requests
            ],
            np.int32,
        ),
        pooling=requests[0].pooling,
        unpooled=np.array([request.unpooled for request in requests], np.int32),
    )


def _completion(request: Request, vector: Float32, stats: RequestStats) -> Completion:
    if not np.isfinite(vector).all():
        message = "the model's hidden states contain NaN or infinity"
        return Completion(request, [], "nan_logits", message, stats)
    return Completion(request, [], stats=stats, hidden_state=vector)
