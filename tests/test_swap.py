"""Rows have the same outputs in a pool that is far too small, with each kind of preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.scheduler.preemption import Preemption, PreemptionPolicy
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.stats import StepStats
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler
from tests.engine.invariants import check_scheduler
from tests.models import VOCAB_SIZE, make_checkpoint

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 128}
SMALL_POOL, LARGE_POOL = 15, 4096
PREFIX, BLOCK_SIZE = 18, 4


def requests() -> list[Request]:
    """Return rows with 1 or 3 samples and beam searches; half of them share a prefix.

    Their end token does not exist in the model, so the engine cannot know their lengths.
    """
    rng = np.random.default_rng(5)
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, stop_token_ids=[VOCAB_SIZE]),
        SamplingParams(max_tokens=12, temperature=1.0, n=3, stop_token_ids=[VOCAB_SIZE]),
        SamplingParams(max_tokens=12, beam_width=2, n=2, stop_token_ids=[VOCAB_SIZE]),
    ]
    prefix, rows = rng.integers(25, VOCAB_SIZE, PREFIX), []
    for row in range(108):
        own = rng.integers(25, VOCAB_SIZE, rng.integers(1, 16))
        prompt = np.concatenate([prefix, own]) if row % 2 else own
        request = Request(row, prompt.astype(np.int32), params[row % 3], (1, row))
        rows.append(replace(request, reused_prefix_len=PREFIX if row % 2 and row < 107 else 0))
    return rows


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), **WIDE)
    return load_model(ModelConfig(str(folder)), device=CPU)


def run(
    loaded: LoadedModel,
    num_blocks: int,
    preemption: Preemption,
    num_host_blocks: int,
    *,
    layer_major: bool = False,
) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run all rows; the engine forecasts short outputs."""
    layout = loaded.layout(BLOCK_SIZE)
    cache = KVCache(
        layout, num_blocks, CPU, torch.float32, num_host_blocks, layer_major=layer_major
    )
    cache.blocks[:-1].fill_(torch.nan)  # old contents must not be read
    pool = BlockPool(
        num_blocks, BLOCK_SIZE, enable_prefix_caching=True, num_host_blocks=num_host_blocks
    )
    table = SequenceTable(256, loaded.max_model_len, BLOCK_SIZE)
    # The copy time is fixed: if measured on a busy machine, it may exceed the time to recompute.
    scheduler = Scheduler(pool, table, 512, PreemptionPolicy(preemption, block_copy_s=1e-6))
    scheduler.output_lengths.observe(np.full(500, 2), np.ones(500, dtype=np.bool_))
    engine = Engine(scheduler, ModelRunner(loaded.model, cache, Sampler()))
    for request in requests():
        engine.add_request(request)
    completions, steps = {}, []
    while engine.num_unfinished:
        outcome = engine.step()
        check_scheduler(scheduler)
        completions |= {done.request.row_id: done for done in outcome.completions}
        steps += [outcome.stats] if outcome.stats else []
    assert pool.num_used == 0
    return completions, steps


def answers(completions: dict[int, Completion]) -> dict[int, list[tuple[list[int], float]]]:
    assert not any(done.error_code for done in completions.values())
    return {
        row: [(output.token_ids.tolist(), output.cumulative_logprob) for output in done.outputs]
        for row, done in completions.items()
    }


@pytest.fixture(scope="module")
def in_a_large_pool(llama: LoadedModel) -> dict[int, list[tuple[list[int], float]]]:
    completions, steps = run(llama, LARGE_POOL, "recompute", 0)
    assert sum(step.num_preempted for step in steps) == 0
    assert max(step.kv_blocks_used for step in steps) * 0.02 > SMALL_POOL
    return answers(completions)


@pytest.mark.parametrize(
    ("preemption", "num_host_blocks", "layer_major"),
    [
        ("recompute", 0, False),
        pytest.param("swap", 2000, False, marks=pytest.mark.long),
        ("swap", 3, False),
        pytest.param("auto", 2000, False, marks=pytest.mark.long),
        ("auto", 20, False),
        ("swap", 2000, True),
    ],
)
def test_swapped_rows_equal_rows_of_a_large_pool(
    llama: LoadedModel,
    in_a_large_pool: dict[int, list[tuple[list[int], float]]],
    preemption: Preemption,
    num_host_blocks: int,
    layer_major: bool,
) -> None:
    completions, steps = run(
        llama, SMALL_POOL, preemption, num_host_blocks, layer_major=layer_major
    )
    found = answers(completions)
    assert {row: [tokens for tokens, _ in outputs] for row, outputs in found.items()} == {
        row: [tokens for tokens, _ in outputs] for row, outputs in in_a_large_pool.items()
    }
    for row, outputs in found.items():
        for (_, logprob), (_, expected) in zip(outputs, in_a_large_pool[row], strict=True):
            assert logprob == pytest.approx(expected, abs=1e-4)
    assert sum(step.num_preempted for step in steps) > 10
    assert (sum(step.swapped_in_blocks for step in steps) > 0) == (num_host_blocks > 0)
    if preemption == "swap" and num_host_blocks > 100:
        beams = sum(done.stats.preemptions for row, done in completions.items() if row % 3 == 2)
        assert sum(step.recomputed_tokens for step in steps) <= BLOCK_SIZE * beams
