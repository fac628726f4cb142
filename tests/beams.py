"""Beam searches of tiny random models, in the engine and in transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.stats import StepStats
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler
from tests.engine.invariants import check_scheduler
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model

EOS = tuple(range(5, 25))
MODEL = {"eos_token_id": list(EOS), "pad_token_id": 0, "initializer_range": 0.1}
OUTPUT_TOKENS = 20
NUM_PROMPTS = 32
TIE = 1e-4  # scores closer than this count as a tie
CPU = torch.device("cpu")

Checkpoints = Callable[[str], LoadedModel]


@dataclass(frozen=True)
class Setup:
    """Settings of an engine; all settings must give the same beams."""

    block_size: int = 16
    num_blocks: int = 2048
    max_tokens: int = 512
    runs_ahead: bool = False
    misleading: bool = False
    """Make the engine expect short outputs, so that the pool becomes too small."""


SMALL_POOL = Setup(block_size=4, num_blocks=70, misleading=True)


@functools.cache
def prompts() -> list[list[int]]:
    """Return rows of 1 to 40 tokens; some share a prefix."""
    rng = np.random.default_rng(11)
    prefix = rng.integers(25, VOCAB_SIZE, 21).tolist()
    return [
        prefix * (row % 3 == 0) + rng.integers(25, VOCAB_SIZE, rng.integers(1, 20)).tolist()
        for row in range(NUM_PROMPTS)
    ]


def checkpoints(factory: pytest.TempPathFactory) -> Checkpoints:
    """Return a function that loads a family's tiny checkpoint, each only once."""

    @functools.cache
    def load(family: str) -> LoadedModel:
        folder = make_checkpoint(family, factory.mktemp(family), **MODEL)
        return load_model(ModelConfig(str(folder)), device=CPU)

    return load


def make_engine(loaded: LoadedModel, setup: Setup) -> Engine:
    """Return an engine with the loaded model."""
    cache = KVCache(loaded.layout(setup.block_size), setup.num_blocks, CPU, torch.float32)
    cache.pool[:-1].fill_(torch.nan)  # old contents must not be read
    size, windows, per_state = setup.block_size, cache.layout.windows, cache.layout.slots_per_state
    pool = BlockPool(
        setup.num_blocks,
        size,
        enable_prefix_caching=True,
        windows=windows,
        slots_per_state=per_state,
    )
    table = SequenceTable(64, loaded.max_model_len, size, windows, per_state)
    scheduler = Scheduler(pool, table, setup.max_tokens)
    if setup.misleading:
        scheduler.output_lengths.observe(np.full(2000, 2), np.ones(2000, dtype=np.bool_))
    runner = ModelRunner(loaded.model, cache, Sampler())
    return Engine(scheduler, runner, runs_ahead=setup.runs_ahead)


def request(row: int, params: SamplingParams, **others: Any) -> Request:
    """Return a request for a continuation of a row of ``prompts``."""
    ids = np.asarray(prompts()[row], dtype=np.int32)
    return Request(row, ids, params, (0, row), frozenset(EOS), **others)


def run(
    engine: Engine, requests: Sequence[Request]
) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run the requests on an engine; check invariants after each step."""
    for one in requests:
        engine.add_request(one)
    completions, steps = {}, []
    while engine.num_unfinished:
        outcome = engine.step()
        check_scheduler(engine.scheduler)
        completions |= {done.request.row_id: done for done in outcome.completions}
        steps += [outcome.stats] if outcome.stats else []
    assert engine.scheduler.pool.num_used == 0
    return completions, steps


@dataclass(frozen=True)
class Found:
    """A beam that transformers finds."""

    token_ids: list[int]
    score: float
    logprobs: list[float]


def generate(family: str, row: int, width: int, **options: Any) -> list[Found]:
    """Return all beams of transformers' beam search on a row of ``prompts``, best first."""
    ids = torch.tensor([prompts()[row]])
    found = _model(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        early_stopping=False,
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    logprobs = _model(family).compute_transition_scores(
        found.sequences, found.scores, found.beam_indices
    )
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    tokens = found.sequences[:, ids.shape[1] :].tolist()
    return [
        Found(
            tokens[at][:length], float(found.sequences_scores[at]), logprobs[at, :length].tolist()
        )
        for at, length in enumerate(lengths)
    ]


@functools.cache
def _model(family: str) -> Any:
    return tiny_model(family, **MODEL)
