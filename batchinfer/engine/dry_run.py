"""An engine that computes nothing: the same schedule, on a clock that a roofline sets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from batchinfer.config import EngineConfig
from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.engine import Engine
from batchinfer.engine.request import Request
from batchinfer.engine.roofline import (
    PERFECT,
    WELL_BUILT,
    Device,
    ModelCost,
    StepWork,
    step_seconds,
)
from batchinfer.engine.runner import Pending, Ready
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.step import Int32, Step, StepResult
from batchinfer.engine.table import SequenceTable

END_TOKEN = 2**31 - 1
"""What samples end with that end before ``max_tokens``; no model has such a token."""
_FILLER = 2**30  # and up: tokens that no prompt has
# Measured on two cores: the host's own time, which a GPU hides if its step takes longer, and what
# steps of a tiny model take on a CPU beside arithmetic.
_HOST_STEP_S = 1.2e-3
_HOST_CHUNK_S = 0.17e-3
_CPU_SAMPLE_S = 35e-6
_CPU_TOKEN_S = 5e-6


class DryRunner:
    """Draws made-up tokens, different for every sample, and adds up the time of each step.

    Args:
        model: what a token costs.
        device: what it runs on.
        end_after: samples draw ``END_TOKEN`` when they come to so many tokens; None: never.
    """

    def __init__(self, model: ModelCost, device: Device, end_after: int | None = None) -> None:
        self.seconds = 0.0
        """Time of all steps, on a well-built engine; the engine's clock."""
        self.bound_s = 0.0
        """The same at the device's limits."""
        self.samples_drawn = 0
        """Output tokens so far."""
        self._model = model
        self._device = device
        self._end_after = end_after

    def submit(self, step: Step) -> Pending:
        """Let the step's time pass."""
        work = StepWork.of(step)
        self.seconds += self._step_seconds(work)
        self.bound_s += step_seconds(self._model, self._device, work, PERFECT)
        self.samples_drawn += step.num_samples
        return Ready(
            StepResult(
                token_ids=self._tokens(step),
                logprobs=np.zeros(step.num_samples, dtype=np.float32),
                nonfinite=np.zeros(step.num_samples, dtype=np.bool_),
                ranks=None,
                top_token_ids=None,
                top_logprobs=None,
            )
        )

    def _step_seconds(self, work: StepWork) -> float:
        host = _HOST_STEP_S + work.chunks * _HOST_CHUNK_S
        computing = step_seconds(self._model, self._device, work, WELL_BUILT)
        if self._device.is_gpu:
            return max(host, computing)
        beside = work.logits_rows * _CPU_SAMPLE_S + work.tokens * _CPU_TOKEN_S
        return host + computing + beside

    def _tokens(self, step: Step) -> Int32:
        """[K] token ids; equal prompts do not go on alike, so that no output is shared."""
        batch = step.sampling
        mixed = batch.stream * 7919 + batch.sample_index.astype(np.uint64) * 104_729
        mixed = (mixed + batch.position.astype(np.uint64)) % np.uint64(_FILLER - 1)
        tokens = mixed.astype(np.int32) + np.int32(_FILLER)
        if self._end_after is not None:
            tokens[batch.position >= self._end_after - 1] = END_TOKEN
        return tokens


def make_dry_engine(
    config: EngineConfig,
    model: ModelCost,
    device: Device,
    *,
    num_blocks: int,
    max_model_len: int,
    end_after: int | None = None,
) -> tuple[Engine, DryRunner]:
    """An engine as a run would have it, over a ``DryRunner`` and on its clock."""
    pool = BlockPool(
        num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    table = SequenceTable(config.max_num_seqs, max_model_len, config.block_size)
    runner = DryRunner(model, device, end_after)
    scheduler = Scheduler(pool, table, config.max_num_batched_tokens)
    engine = Engine(scheduler, runner, lambda: runner.seconds, runs_ahead=device.is_gpu)
    return engine, runner


@dataclass(frozen=True, slots=True)
class WorkloadSeconds:
    """How long a workload takes, in seconds."""

    bound: float
    """At the device's limits, one operator after another."""
    expected: float
    """On a well-built engine."""


def workload_seconds(
    model: ModelCost,
    device: Device,
    requests: Iterable[Request],
    config: EngineConfig,
    *,
    num_blocks: int,
    max_model_len: int,
) -> WorkloadSeconds:
    """Time of the engine's own schedule for ``requests``, all queued at once.

    Each of their samples runs to ``max_tokens``.
    """
    engine, runner = make_dry_engine(
        config, model, device, num_blocks=num_blocks, max_model_len=max_model_len
    )
    for request in requests:
        engine.add_request(request)
    while engine.num_unfinished:
        engine.step()
    return WorkloadSeconds(runner.bound_s, runner.seconds)
