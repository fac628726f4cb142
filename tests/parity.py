"""Runs rows on the whole engine, and compares their tokens with transformers'."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.config import SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.scheduler.preemption import PreemptionPolicy
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.stats import StepStats
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler
from batchinfer.worker.vision.image_embeddings import ImageEmbeddings
from tests.engine.invariants import check_scheduler
from tests.engine.prompt_trees import planned
from tests.models import VOCAB_SIZE

TIE = 1e-4  # logits closer than this count as a tie
OUTPUT_TOKENS = 12
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """Settings of an engine and its rows."""

    block_size: int = 16
    pool_tokens: int = 4096
    num_states: int = 64
    """Number of recurrent states for which the pool has room, in addition to the KV blocks."""
    max_tokens: int = 512
    caching: bool = True
    n: int = 1
    longer: int = 0
    """Number of further tokens in each of the prefixes."""
    temperature: float = 0.0
    backwards: bool = False
    preempt_every: int = 0
    """Preempt the newest sequence after this many steps; 0: never."""
    runs_ahead: bool = False
    misleading: bool = False
    """Make the engine expect short outputs, so that the pool becomes too small."""
    num_host_blocks: int = 0
    """Host slots; preempted sequences are swapped if there are any."""


@functools.cache
def prompts(longer: int = 0) -> list[list[int]]:
    """Return rows with two long prefixes, and rows that share nothing."""
    rng = np.random.default_rng(7)
    prefixes = [
        rng.integers(2, VOCAB_SIZE, 37 + longer).tolist(),
        rng.integers(2, VOCAB_SIZE, 21 + longer).tolist(),
        [],
    ]
    return [
        prefixes[row % 3] + rng.integers(2, VOCAB_SIZE, rng.integers(1, 20)).tolist()
        for row in range(9)
    ]


def make_engine(
    loaded: LoadedModel, setup: Setup, images: ImageEmbeddings | None = None
) -> tuple[Engine, Scheduler]:
    """Return an engine with the loaded model, and its scheduler."""
    layout = loaded.layout(setup.block_size)
    num_blocks = setup.pool_tokens // setup.block_size * len(layout.windows)
    num_blocks += setup.num_states * layout.slots_per_state
    dtype, num_host_blocks = getattr(torch, loaded.dtype), setup.num_host_blocks
    num_host_blocks *= not any(layout.windows)
    cache = KVCache(layout, num_blocks, CPU, dtype, num_host_blocks)
    cache.pool[:-1].fill_(torch.nan)  # old contents must not be read
    windows = cache.layout.windows
    pool = BlockPool(
        num_blocks,
        setup.block_size,
        enable_prefix_caching=setup.caching,
        num_host_blocks=num_host_blocks,
        windows=windows,
        slots_per_state=layout.slots_per_state,
    )
    table = SequenceTable(
        64, loaded.max_model_len, setup.block_size, windows, layout.slots_per_state
    )
    policy = PreemptionPolicy("swap" if num_host_blocks else "recompute")
    scheduler = Scheduler(pool, table, setup.max_tokens, policy)
    runner = ModelRunner(loaded.model, cache, Sampler(), images=images)
    return Engine(scheduler, runner, runs_ahead=setup.runs_ahead), scheduler


def run(loaded: LoadedModel, setup: Setup) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run all prompts on an engine with the loaded model."""
    engine, scheduler = make_engine(loaded, setup)
    params = SamplingParams(
        max_tokens=OUTPUT_TOKENS,
        temperature=setup.temperature,
        n=setup.n,
        stop_token_ids=[VOCAB_SIZE] if setup.misleading else [],  # an id that no model has
    )
    if setup.misleading:
        scheduler.output_lengths.observe(np.full(100, 2), np.ones(100, dtype=np.bool_))
    rows = list(enumerate(prompts(setup.longer)))
    rows = rows[::-1] if setup.backwards else rows
    points = planned(prompts(setup.longer), [row for row, _ in rows])
    for row, prompt in rows:
        token_ids, branches = np.asarray(prompt, dtype=np.int32), points.get(row, ())
        engine.add_request(Request(row, token_ids, params, (3, row), branch_points=branches))
    return run_engine(engine, scheduler, setup)


def run_engine(
    engine: Engine, scheduler: Scheduler, setup: Setup
) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run an engine's requests to their ends. Return completions by row, and statistics."""
    completions, steps = {}, []
    for _ in itertools.takewhile(lambda _: engine.num_unfinished, itertools.count()):
        outcome = engine.step()
        check_scheduler(scheduler)
        completions |= {done.request.row_id: done for done in outcome.completions}
        steps += [outcome.stats] if outcome.stats else []
        running = list(scheduler.table.running())
        if running and setup.preempt_every and len(steps) % setup.preempt_every == 0:
            scheduler.preempt(running[-1])
    return completions, steps


def tokens_of(completions: dict[int, Completion]) -> dict[tuple[int, int], list[int]]:
    return {
        (row, output.index): output.token_ids.tolist()
        for row, completion in completions.items()
        for output in completion.outputs
    }


@torch.inference_mode()
def assert_greedy(model: Any, completions: dict[int, Completion], longer: int = 0) -> None:
    """Check that transformers would choose each token after its predecessors, except for ties."""
    assert len(completions) == len(prompts(longer))
    for row, completion in completions.items():
        assert completion.error_code is None
        for output in completion.outputs:
            assert len(output.token_ids) == OUTPUT_TOKENS
            ids = torch.tensor([[*prompts(longer)[row], *output.token_ids.tolist()]])
            logits = model(ids, use_cache=False).logits[0, -OUTPUT_TOKENS - 1 : -1]
            taken = logits[torch.arange(OUTPUT_TOKENS), ids[0, -OUTPUT_TOKENS:]]
            assert (logits.max(dim=1).values - taken).max() < TIE, f"row {row} left the greedy path"
            logprobs = logits.log_softmax(dim=1)[
                torch.arange(OUTPUT_TOKENS), ids[0, -OUTPUT_TOKENS:]
            ]
            assert output.cumulative_logprob == pytest.approx(float(logprobs.sum()), abs=1e-3)
