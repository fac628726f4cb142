"""Dry runs: the real engine, with a runner that computes nothing and adds up roofline times."""

from __future__ import annotations

import numpy as np

from batchinfer.config import EngineConfig
from batchinfer.engine.encoder_engine import EncoderEngine
from batchinfer.engine.encoder_step import EncoderStep
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.runner import Pending, Ready
from batchinfer.engine.scheduler.preemption import PreemptionPolicy
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.engine.simulate.roofline import (
    PERFECT,
    WELL_BUILT,
    Device,
    StepWork,
    step_seconds,
)
from batchinfer.engine.step import Float32, Int32, Step, StepResult

END_TOKEN = 2**31 - 1
"""Last token of samples that end before ``max_tokens``. No model's vocabulary contains it."""
_FILLER = 2**30  # token ids of prompts are lower
# Simulated log-probabilities of beam candidates: the largest random penalty of a beam, the gap
# between consecutive candidates, and the penalty of tokens that must not be drawn.
_BEAM_LUCK = 1.0
_NEXT_BEST = 0.25
_NEVER = 1e6
# The host's time per step, chunk, sample and token, measured on two cores. On a GPU, only the times
# per step and chunk apply, and only if their sum exceeds the GPU's own time. On a CPU, all four add
# to the time of its arithmetic.
_HOST_STEP_S = 1.2e-3
_HOST_CHUNK_S = 0.17e-3
_CPU_SAMPLE_S = 35e-6
_CPU_TOKEN_S = 5e-6


class _RooflineClock:
    def __init__(self, model: ModelCost, device: Device) -> None:
        self.seconds = 0.0
        """Estimated time of all steps. The engine uses it as its clock."""
        self.bound_s = 0.0
        """Time of all steps at the device's limits."""
        self.samples_drawn = 0
        """Number of output tokens so far; for an encoder, the number of texts."""
        self._model = model
        self._device = device

    def _advance(self, work: StepWork, num_samples: int) -> None:
        computing = step_seconds(self._model, self._device, work, WELL_BUILT)
        self.seconds += host_seconds(work, self._device, computing)
        self.bound_s += step_seconds(self._model, self._device, work, PERFECT)
        self.samples_drawn += num_samples


class DryEncoder(_RooflineClock):
    """Returns constant vectors and adds up roofline times."""

    def encode(self, step: EncoderStep) -> Float32:
        """Add the step's time; return vectors of width 1."""
        lengths = step.lengths.astype(np.int64)
        pairs = int((lengths * lengths).sum())
        self._advance(StepWork(step.num_tokens, 0, 0, len(lengths), 0, pairs), len(lengths))
        return np.ones((len(lengths), 1), np.float32)


class DryRunner(_RooflineClock):
    """Draws arbitrary tokens, different for every sample, and adds up roofline times.

    Beam candidates get artificial log-probabilities, with which a search continues only a few
    beams, as in a search with a real model.

    Args:
        end_after: output tokens after which a sample draws ``END_TOKEN``; None: never.
        block_copy_s: seconds to copy a block to or from the host.
    """

    def __init__(
        self,
        model: ModelCost,
        device: Device,
        end_after: int | None = None,
        block_copy_s: float = 0.0,
    ) -> None:
        super().__init__(model, device)
        self._end_after = end_after
        self._block_copy_s = block_copy_s

    def submit(self, step: Step) -> Pending:
        """Add the step's time and draw its tokens."""
        self._advance(StepWork.of(step), step.num_samples)
        self.seconds += self._block_copy_s * (len(step.swap_outs) + len(step.swap_ins))
        tokens = self._tokens(step)
        top_token_ids, top_logprobs = _candidates(step, tokens)
        return Ready(
            StepResult(
                token_ids=tokens,
                logprobs=np.zeros(step.num_samples, dtype=np.float32),
                nonfinite=np.zeros(step.num_samples, dtype=np.bool_),
                ranks=None,
                top_token_ids=top_token_ids,
                top_logprobs=top_logprobs,
                scored=_scored(step),
                hidden_states=None
                if step.pooled is None
                else np.ones((len(step.pooled), 1), dtype=np.float32),
            )
        )

    def _tokens(self, step: Step) -> Int32:
        """Return token ids [K]. Samples of equal prompts get different tokens, so they share no
        blocks of output."""
        batch = step.sampling
        mixed = batch.stream * 7919 + batch.sample_index.astype(np.uint64) * 104_729
        mixed = (mixed + batch.position.astype(np.uint64)) % np.uint64(_FILLER - 1)
        tokens = mixed.astype(np.int32) + np.int32(_FILLER)
        if self._end_after is not None:
            tokens[batch.position >= self._end_after - 1] = END_TOKEN
        return tokens


def host_seconds(work: StepWork, device: Device, computing: float) -> float:
    """Return the seconds of a step that takes the device ``computing`` s, with the host's work."""
    host = _HOST_STEP_S + work.chunks * _HOST_CHUNK_S
    if device.is_gpu:
        return max(host, computing)
    return host + computing + work.logits_rows * _CPU_SAMPLE_S + work.tokens * _CPU_TOKEN_S


def _scored(step: Step) -> StepResult | None:
    if step.scored is None:
        return None
    tokens, most = step.scored.token_ids, int(step.scored.num_logprobs.max())
    return StepResult(
        token_ids=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        nonfinite=np.zeros(len(tokens), dtype=np.bool_),
        ranks=np.ones(len(tokens), dtype=np.int32),
        top_token_ids=np.zeros((len(tokens), most), dtype=np.int32),
        top_logprobs=np.zeros((len(tokens), most), dtype=np.float32),
    )


def _candidates(step: Step, tokens: Int32) -> tuple[Int32 | None, Float32 | None]:
    """Return simulated continuations of beams, best first, [K, L]; None if the step has no beams.

    A beam that should end gets an end token that is far more probable than any other. As in real
    searches, most beams descend from a few recent beams and differ only in their last tokens.
    """
    wanted = step.sampling.num_logprobs
    most = int(wanted.max(initial=0))
    if most <= 0:
        return None, None
    ranks = np.arange(most)
    place = np.arange(len(tokens), dtype=np.int64)[:, None] + tokens.astype(np.int64)[:, None]
    token_ids = _FILLER + (place * 31 + ranks) % (_FILLER - 1)
    luck = (place * 2_654_435_761 % 1_000_003) / 1_000_003
    logprobs = -_BEAM_LUCK * luck - _NEXT_BEST * ranks
    ends = tokens == END_TOKEN
    token_ids[ends, 0], logprobs[ends, 0], logprobs[ends, 1:] = END_TOKEN, 0.0, -_NEVER
    return token_ids.astype(np.int32), logprobs.astype(np.float32)


def make_dry_engine(
    config: EngineConfig,
    model: ModelCost,
    device: Device,
    *,
    num_blocks: int,
    max_model_len: int,
    num_host_blocks: int = 0,
    end_after: int | None = None,
    windows: tuple[int, ...] = (0,),
    slots_per_state: int = 0,
) -> tuple[Engine, DryRunner]:
    """Make the engine that a real run uses, with a ``DryRunner`` as runner and clock."""
    pool = BlockPool(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        windows=windows,
        slots_per_state=slots_per_state,
    )
    table = SequenceTable(
        config.max_num_seqs, max_model_len, config.block_size, windows, slots_per_state
    )
    block_copy_s = model.kv_bytes * config.block_size / device.host_bandwidth
    runner = DryRunner(model, device, end_after, block_copy_s)
    preemption_policy = (
        PreemptionPolicy(config.preemption, block_copy_s) if num_host_blocks else PreemptionPolicy()
    )
    scheduler = Scheduler(pool, table, config.max_num_batched_tokens, preemption_policy)
    engine = Engine(scheduler, runner, lambda: runner.seconds, runs_ahead=device.is_gpu)
    return engine, runner


def make_dry_encoder(
    config: EngineConfig, model: ModelCost, device: Device, *, max_model_len: int
) -> tuple[EncoderEngine, DryEncoder]:
    """Make the encoder engine that a real run uses, with a ``DryEncoder`` as runner and clock."""
    runner = DryEncoder(model, device)
    engine = EncoderEngine(
        runner,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        clock=lambda: runner.seconds,
    )
    return engine, runner
