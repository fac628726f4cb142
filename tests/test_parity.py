"""Greedy jobs through the whole engine say what transformers' own models say."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

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
from batchinfer.engine.step import SharedPrefixes
from batchinfer.engine.step_io import shared_prefix
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler
from tests.engine.invariants import check_scheduler
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",  # sliding window of 9, shorter than the prompts
    "gemma2",  # softcap
    "gemma3_text",
    "gpt_oss",  # sinks
    "qwen3_moe",
    "phi3",
    "gpt2",
)
TIE = 1e-4  # logits this near may come out either way
OUTPUT_TOKENS = 12
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """One way to run the same rows."""

    block_size: int = 16
    pool_tokens: int = 4096
    max_tokens: int = 512
    caching: bool = True
    n: int = 1
    longer: int = 0
    """Further tokens in each of the prefixes."""
    temperature: float = 0.0
    backwards: bool = False
    preempt_every: int = 0
    """Steps after which the newest sequence loses its blocks."""
    runs_ahead: bool = False
    misleading: bool = False
    """Whether outputs are expected to be short, so that the pool gets too small."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """Loads a tiny checkpoint of a family, once."""

    @functools.cache
    def load(family: str) -> LoadedModel:
        folder = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return load_model(ModelConfig(str(folder)), device=CPU)

    return load


@functools.cache
def prompts(longer: int = 0) -> list[list[int]]:
    """Rows under two long prefixes, and some that share nothing."""
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


def run(loaded: LoadedModel, setup: Setup) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run all prompts through an engine over the loaded model."""
    layout = loaded.layout(setup.block_size)
    num_blocks = setup.pool_tokens // setup.block_size * len(layout.windows)
    cache = KVCache(layout, num_blocks, CPU, torch.float32)
    cache.pool[:-1].fill_(torch.nan)  # whatever was there before must not be seen
    windows = cache.layout.windows
    pool = BlockPool(
        num_blocks, setup.block_size, enable_prefix_caching=setup.caching, windows=windows
    )
    table = SequenceTable(64, loaded.max_model_len, setup.block_size, windows)
    scheduler = Scheduler(pool, table, setup.max_tokens)
    runner = ModelRunner(loaded.model, cache, Sampler())
    engine = Engine(scheduler, runner, runs_ahead=setup.runs_ahead)
    params = SamplingParams(
        max_tokens=OUTPUT_TOKENS,
        temperature=setup.temperature,
        n=setup.n,
        stop_token_ids=[VOCAB_SIZE] if setup.misleading else [],  # which no model has
    )
    if setup.misleading:
        scheduler.output_lengths.observe(np.full(100, 2), np.ones(100, dtype=np.bool_))
    rows = list(enumerate(prompts(setup.longer)))
    for row, prompt in reversed(rows) if setup.backwards else rows:
        engine.add_request(Request(row, np.asarray(prompt, dtype=np.int32), params, (3, row)))
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


@functools.cache
def eager(family: str) -> torch.nn.Module:
    """transformers' model of the same weights, with its own attention."""
    return tiny_model(family)


@torch.inference_mode()
def assert_greedy(family: str, completions: dict[int, Completion], longer: int = 0) -> None:
    """Every token is the one transformers would take after those before it, but for ties."""
    assert len(completions) == len(prompts(longer))
    for row, completion in completions.items():
        assert completion.error_code is None
        for output in completion.outputs:
            assert len(output.token_ids) == OUTPUT_TOKENS
            ids = torch.tensor([[*prompts(longer)[row], *output.token_ids.tolist()]])
            logits = eager(family)(ids).logits[0, -OUTPUT_TOKENS - 1 : -1]
            taken = logits[torch.arange(OUTPUT_TOKENS), ids[0, -OUTPUT_TOKENS:]]
            assert (logits.max(dim=1).values - taken).max() < TIE, f"row {row} left the greedy path"
            logprobs = logits.log_softmax(dim=1)[
                torch.arange(OUTPUT_TOKENS), ids[0, -OUTPUT_TOKENS:]
            ]
            assert output.cumulative_logprob == pytest.approx(float(logprobs.sum()), abs=1e-3)


SETUPS = {
    "plain": Setup(),
    "block_size_1": Setup(block_size=1),
    "block_size_32": Setup(block_size=32),
    "no_prefix_caching": Setup(caching=False),
    "three_samples": Setup(n=3),
    "chunks_of_7": Setup(max_tokens=7),
    "rows_preempted": Setup(block_size=4, pool_tokens=100, preempt_every=3, misleading=True),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, setup: Setup, checkpoint) -> None:
    completions, steps = run(checkpoint(family), setup)
    assert_greedy(family, completions)
    distinct = sum(len(prompt) for prompt in prompts()) - 2 * 37 - 2 * 21
    if setup.caching and not setup.n > 1 and setup.pool_tokens > 1000 and setup.max_tokens > 7:
        assert sum(step.prefill_tokens for step in steps) <= distinct + 9


AHEAD = {
    "plain": Setup(runs_ahead=True),
    "three_samples": Setup(runs_ahead=True, n=3),
    "chunks_of_7": Setup(runs_ahead=True, max_tokens=7),
}
CROWDED = {
    "llama": Setup(runs_ahead=True, block_size=4, pool_tokens=100, misleading=True),
    "gpt_oss": Setup(  # a row takes 18 slots and two windows' 6
        runs_ahead=True, block_size=4, pool_tokens=48, max_tokens=12, misleading=True
    ),
}


@pytest.mark.parametrize("setup", AHEAD.values(), ids=AHEAD.keys())
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_one_step_ahead_greedy_equals_transformers(family: str, setup: Setup, checkpoint) -> None:
    completions, steps = run(checkpoint(family), setup)
    assert_greedy(family, completions)
    assert sum(step.num_preempted for step in steps) == 0


@pytest.mark.parametrize("family", CROWDED)
def test_one_step_ahead_in_a_small_pool_greedy_equals_transformers(family: str, checkpoint) -> None:
    completions, steps = run(checkpoint(family), CROWDED[family])
    assert_greedy(family, completions)
    assert sum(step.num_preempted for step in steps) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_rows_that_attend_together_equal_transformers(
    family: str, checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows under prefixes of 177 and 161 tokens, 8 samples each."""
    told = []
    monkeypatch.setattr(
        shared_prefix,
        "SharedPrefixes",
        lambda *of: told.append(SharedPrefixes(*of)) or told[-1],
    )
    setup = Setup(n=8, longer=140)
    completions, _ = run(checkpoint(family), setup)
    assert_greedy(family, completions, setup.longer)
    assert max(len(of.order) for of in told) > 40
    assert max(int(of.shared_lens.max()) for of in told) == 192  # the samples of one row


def test_a_generate_call_agrees(checkpoint) -> None:
    """The check above reads logits; this one compares with ``generate`` itself."""
    completions, _ = run(checkpoint("llama"), Setup())
    model = eager("llama")
    for row, prompt in enumerate(prompts()):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=0
        )
        assert tokens_of(completions)[row, 0] == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "other",
    [
        Setup(temperature=1.0, backwards=True),
        Setup(temperature=1.0, block_size=4, pool_tokens=116, preempt_every=2),
        Setup(temperature=1.0, caching=False, max_tokens=16),
        Setup(temperature=1.0, n=4),
        Setup(temperature=1.0, runs_ahead=True),
    ],
    ids=["other_order", "preempted", "uncached_small_chunks", "more_samples", "one_ahead"],
)
def test_sampled_tokens_do_not_depend_on_company(other: Setup, checkpoint) -> None:
    loaded = checkpoint("qwen3")
    alone = tokens_of(run(loaded, Setup(temperature=1.0))[0])
    beside = tokens_of(run(loaded, other)[0])
    assert {key: beside[key] for key in alone} == alone


def test_preempted_rows_are_recomputed(checkpoint) -> None:
    """Guards the setup above: rows must lose blocks that others then take."""
    _, steps = run(checkpoint("llama"), SETUPS["rows_preempted"])
    assert sum(step.recomputed_tokens for step in steps) > 10
