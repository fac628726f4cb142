"""Simulates a job for ``batchinfer plan``: runs its rows on an engine that computes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from batchinfer.config import SamplingParams
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.engine import Engine
from batchinfer.engine.metrics import MetricsCollector
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.simulate.dry_run import END_TOKEN, DryEncoder, DryRunner
from batchinfer.errors import RowError
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.run.dedup import RequestDeduplicator, copy_result
from batchinfer.requests.requests import PromptRow
from batchinfer.text.prompts import Prompt

MAX_STEPS = 50_000
MAX_OUTPUT_TOKENS = 2**24
_SCHEDULING = ("max_tokens", "n", "min_tokens", "beam_width", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class ExpectedLengths:
    max_model_len: int
    eos_token_ids: frozenset[int]
    """The model's end-of-sequence tokens. The simulation does not know the output length of a row
    that may stop at one of these tokens."""
    expected: int | None
    """Expected output tokens per sample; None to assume ``max_tokens``."""
    task: LoadedTask | None = None
    """A task that writes no tokens; each of its requests counts as one drawn token. None for tasks
    that write tokens."""

    def output_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens a request writes, over all samples."""
        return 0 if self.task else params.n * self._per_sample(num_prompt_tokens, params)

    def drawn_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens a request draws, including tokens of beams that it drops."""
        if self.task:
            return 1
        return (params.beam_width or params.n) * self._per_sample(num_prompt_tokens, params)

    def _per_sample(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        most = min(params.max_tokens, self.max_model_len - num_prompt_tokens)
        if self.expected is not None:
            most = min(most, max(self.expected, params.min_tokens))
        return most

    def requests(self, row: PromptRow) -> Sequence[Request]:
        """Return the requests of a row whose prompt is not an error.

        As in a run, a request that may stop before ``max_tokens`` has an end token, so the
        scheduler does not know its length in advance.
        """
        if self.task:
            return self.task.requests(row)
        assert isinstance(row.prompt, Prompt)
        assert row.sampling is not None
        params = row.sampling.params
        has_stops = bool(params.stop or params.stop_token_ids)
        may_stop = has_stops or bool(self.eos_token_ids and not params.ignore_eos)
        ends = may_stop or self.expected is not None
        request = Request(
            row_id=row.row_id,
            prompt_token_ids=row.prompt.token_ids,
            params=_scheduling_params(*(getattr(params, name) for name in _SCHEDULING)),
            rng_key=(0, row.row_id),
            eos_token_ids=frozenset([END_TOKEN]) if ends else frozenset(),
            reused_prefix_len=row.reused_prefix_len,
            branch_points=row.branch_points,
            adapter=row.adapter,
        )
        return [request]


@lru_cache(maxsize=1024)  # most rows have equal values, and SamplingParams checks them slowly
def _scheduling_params(*values: Any) -> SamplingParams:
    """Make sampling parameters that set only the values that affect scheduling."""
    return SamplingParams(**dict(zip(_SCHEDULING, values, strict=True)))


@dataclass
class Simulation:
    """Runs at most ``MAX_STEPS`` steps of a job on an engine that computes nothing."""

    engine: Engine | EncoderEngine
    runner: DryRunner | DryEncoder
    block_size: int
    """Tokens per block of the KV cache; 0 without a KV cache."""
    lengths: ExpectedLengths
    max_waiting: int
    """Maximum number of rows that wait in the engine, the same as in a run."""

    def __post_init__(self) -> None:
        self.measured = MetricsCollector(self.block_size)
        self.deduplicated = 0
        """Number of rows that were not run because an identical row was run."""
        self.deduplicated_drawn_tokens = 0
        self._deduplicator = RequestDeduplicator()
        self.refused: Counter[str] = Counter()
        """Number of rows that the engine refused, keyed by error code."""
        self._refused_rows: set[int] = set()
        self.refused_prompt_tokens = 0
        self.refused_output_tokens = 0
        self.refused_drawn_tokens = 0
        self.steps = 0
        self.peak_running = 0
        """Largest number of sequences that ran at the same time."""
        self._running_ms = 0.0

    def run(self, batches: Iterator[list[PromptRow]]) -> bool:
        """Run all rows until they end; return False if a limit stopped the simulation first."""
        exhausted = False
        while not exhausted or self.engine.num_unfinished:
            while not exhausted and self.engine.num_waiting < self.max_waiting:
                batch = next(batches, None)
                exhausted = batch is None
                self._add(batch or [])
            if self.steps >= MAX_STEPS or self.runner.samples_drawn >= MAX_OUTPUT_TOKENS:
                return False
            self._step()
        return True

    @property
    def mean_running(self) -> float:
        """Mean number of running sequences, weighted by time."""
        return self._running_ms / 1e3 / self.runner.seconds if self.steps else 0.0

    def _add(self, batch: list[PromptRow]) -> None:
        rows = [row for row in batch if not isinstance(row.prompt, RowError)]
        for row in self._deduplicator.leaders(rows):
            for request in self.lengths.requests(row):
                self.engine.add_request(request)

    def _step(self) -> None:
        if not self.engine.num_unfinished:
            return
        outcome = self.engine.step()
        copies = [copy for one in outcome.completions for copy in self._copies(one)]
        done = [*outcome.completions, *copies]
        self.measured.add(outcome.stats, [row.stats for row in done])
        if outcome.stats is not None:
            self.steps += 1
            self.peak_running = max(self.peak_running, outcome.stats.num_running)
            self._running_ms += outcome.stats.num_running * outcome.stats.step_ms
        for completion in done:
            if completion.error_code is not None:
                request = completion.request
                tokens, params = request.num_prompt_tokens, request.params
                if request.row_id not in self._refused_rows:
                    self.refused[completion.error_code] += 1
                self._refused_rows.add(request.row_id)
                self.refused_prompt_tokens += tokens
                self.refused_output_tokens += self.lengths.output_tokens(tokens, params)
                self.refused_drawn_tokens += self.lengths.drawn_tokens(tokens, params)

    def _copies(self, completion: Completion) -> Iterator[Completion]:
        """Yield a copy of ``completion`` for each duplicate of its row; a row has one request."""
        request = completion.request
        for row in self._deduplicator.release(request.row_id):
            if completion.error_code is None:
                tokens, params = request.num_prompt_tokens, request.params
                self.deduplicated += 1
                self.deduplicated_drawn_tokens += self.lengths.drawn_tokens(tokens, params)
            yield from copy_result(row, [completion])
