from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from batchinfer.config import EngineConfig, SamplingParams
from batchinfer.engine.request import Request
from batchinfer.engine.simulate.dry_run import END_TOKEN, make_dry_engine
from batchinfer.engine.simulate.model_cost import ModelCost
from batchinfer.engine.simulate.roofline import DEVICES
from tests.engine.fake import make_request, run_all
from tests.engine.simulate.test_roofline import qwen3_8b

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def uniform_lengths(rows: int, shortest: int, longest: int) -> Iterator[Request]:
    """Yield rows of random tokens, with uniformly random lengths of prompts and outputs."""
    lengths = random.Random(0)
    ids = np.random.default_rng(0)
    for row in range(rows):
        prompt = ids.integers(0, 10_000, lengths.randint(shortest, longest), dtype=np.int32)
        params = SamplingParams(max_tokens=lengths.randint(shortest, longest), ignore_eos=True)
        yield Request(row, prompt, params, (0, row))


def test_simulated_samples_end_after_the_given_length() -> None:
    engine, runner = make_dry_engine(
        EngineConfig(max_num_seqs=8, block_size=4),
        qwen3_8b(),
        DEVICES["cpu"],
        num_blocks=64,
        max_model_len=256,
        end_after=5,
    )
    request = make_request(0, [1, 2, 3], max_tokens=20, n=2, min_tokens=0)
    ends = Request(0, request.prompt_token_ids, request.params, (0, 0), frozenset([END_TOKEN]))
    longer = make_request(1, [1, 2, 3], max_tokens=9)
    completions, steps = run_all(engine, [ends, longer])
    lengths = [[len(sample.token_ids) for sample in completions[row].outputs] for row in (0, 1)]
    assert lengths == [[5, 5], [9]]
    assert completions[0].outputs[0].finish_reason == "stop"
    tokens = {tuple(output.token_ids[:4]) for row in (0, 1) for output in completions[row].outputs}
    assert len(tokens) == 3, "all samples continue differently"
    assert sum(step.step_ms for step in steps) == pytest.approx(runner.seconds * 1e3)
    assert 0 < runner.bound_s < runner.seconds
    assert runner.samples_drawn == 19


@pytest.mark.parametrize(
    ("preemption", "host_bandwidth", "swaps"),
    [("swap", 1e9, True), ("auto", 1e12, True), ("auto", 1e3, False), ("recompute", 1e12, False)],
)
def test_auto_preemption_considers_the_time_of_copies(
    preemption: Literal["auto", "recompute", "swap"], host_bandwidth: float, swaps: bool
) -> None:
    """The scheduler expects short outputs, but rows run long, so the pool is too small."""
    device = replace(DEVICES["h200"], host_bandwidth=host_bandwidth)
    engine, runner = make_dry_engine(
        EngineConfig(max_num_seqs=8, block_size=4, preemption=preemption),
        qwen3_8b(),
        device,
        num_blocks=24,
        max_model_len=256,
        num_host_blocks=100,
        end_after=40,
    )
    one = make_request(0, list(range(8)), max_tokens=40)
    rows = [replace(one, row_id=row, eos_token_ids=frozenset([END_TOKEN])) for row in range(6)]
    engine.scheduler.output_lengths.observe(np.full(500, 2), np.ones(500, dtype=np.bool_))
    _, steps = run_all(engine, rows)
    assert sum(step.num_preempted for step in steps) > 0
    copies = sum(step.swapped_in_blocks + step.swapped_out_blocks for step in steps)
    assert (copies > 0) == swaps
    block_bytes = 4 * qwen3_8b().kv_bytes
    assert runner.seconds > copies * block_bytes / host_bandwidth


@pytest.mark.long
def test_a_published_workload_takes_a_plausible_time() -> None:
    """256 rows of 100 to 1,024 prompt and output tokens with Llama 3.1 8B on one H200.

    If operators run one after another, 12,400 output tokens per second are the upper bound; a
    well-built engine reaches 9,500.
    """
    requests = list(uniform_lengths(256, 100, 1024))
    output = sum(request.params.max_tokens for request in requests)
    engine, runner = make_dry_engine(
        EngineConfig(),
        ModelCost.from_config(LLAMA_8B, "bfloat16"),
        DEVICES["h200"],
        num_blocks=20_000,
        max_model_len=4096,
    )
    for request in requests:
        engine.add_request(request)
    while engine.num_unfinished:
        engine.step()
    assert output / runner.bound_s == pytest.approx(12_400, rel=0.05)
    assert output / runner.seconds == pytest.approx(9_500, rel=0.05)


def test_waste_at_these_lengths_is_under_one_percent() -> None:
    engine, _ = make_dry_engine(
        EngineConfig(), qwen3_8b(), DEVICES["h200"], num_blocks=20_000, max_model_len=4096
    )
    for request in uniform_lengths(256, 100, 1024):
        engine.add_request(request)
    waste = []
    while engine.num_unfinished:
        stats = engine.step().stats
        if stats is not None:
            waste.append((stats.kv_waste, stats.step_ms))
    wasted, weights = np.array(waste).T
    assert 0.005 < np.average(wasted, weights=weights) < 0.01


@pytest.mark.parametrize(
    ("reserved", "used", "block_size", "reserving_wastes", "blocks_waste"),
    [(2048, 600, 16, 0.707, 0.013), (4096, 900, 32, 0.780, 0.030)],
)
def test_worked_examples_of_the_docs_are_right(
    reserved: int, used: int, block_size: int, reserving_wastes: float, blocks_waste: float
) -> None:
    """Run the examples of docs/memory-model.md, whose sequence ends with ``used`` tokens."""
    prompt = used - 100
    engine, _ = make_dry_engine(
        EngineConfig(block_size=block_size),
        qwen3_8b(),
        DEVICES["cpu"],
        num_blocks=256,
        max_model_len=reserved,
        end_after=101,  # the last token is never fed back, so it has no KV
    )
    params = SamplingParams(max_tokens=reserved - prompt)
    token_ids = np.arange(prompt, dtype=np.int32)
    engine.add_request(Request(0, token_ids, params, (0, 0), frozenset([END_TOKEN])))
    last = None
    while engine.num_unfinished:
        last = engine.step().stats
    assert last.kv_tokens_live == used
    assert last.contiguous_blocks * block_size == reserved
    reserving = 1 - last.kv_tokens_logical / (last.contiguous_blocks * block_size)
    assert reserving == pytest.approx(reserving_wastes, abs=5e-4)
    assert last.kv_waste == pytest.approx(blocks_waste, abs=5e-4)
