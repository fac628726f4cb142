"""Beam search in the whole engine finds the same beams and scores as transformers' ``generate``."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer.config import SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Completion, Request, SampleOutput
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.stats import StepStats
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler
from tests import beams
from tests.beams import CPU, EOS, NUM_PROMPTS, OUTPUT_TOKENS, SMALL_POOL, TIE, Checkpoints, Setup
from tests.models import VOCAB_SIZE

WIDTHS = (2, 4, 8)
PENALTIES = (0.0, 1.0, 2.0)
SOME = tuple(zip(WIDTHS, PENALTIES, strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return beams.checkpoints(tmp_path_factory)


def run(
    loaded: LoadedModel, setup: Setup, params: list[SamplingParams]
) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run the prompts, each with its own parameters, on an engine with the loaded model."""
    requests = [beams.request(row, one) for row, one in enumerate(params)]
    return beams.run(beams.make_engine(loaded, setup), requests)


def searches(width: int, penalty: float, count: int) -> list[SamplingParams]:
    one = SamplingParams(
        max_tokens=OUTPUT_TOKENS, beam_width=width, n=width, length_penalty=penalty
    )
    return [one] * count


@functools.cache
def reference(family: str, row: int, width: int, penalty: float) -> list[tuple[list[int], float]]:
    """Return the beams that transformers finds, as tokens and score, best first."""
    found = beams.generate(family, row, width, length_penalty=penalty)
    return [(one.token_ids, one.score) for one in found]


def assert_found(family: str, completion: Completion) -> None:
    """Check that beams, their order and their scores equal the reference, except for ties."""
    params, row = completion.request.params, completion.request.row_id
    assert completion.error_code is None
    assert params.beam_width is not None
    best = reference(family, row, params.beam_width, params.length_penalty)
    assert len(completion.outputs) == params.n
    for output, (token_ids, score) in zip(completion.outputs, best, strict=False):
        assert output.score == pytest.approx(score, abs=TIE)
        if output.token_ids.tolist() != token_ids:
            near = [ids for ids, other in best if abs(other - score) < TIE]
            assert output.token_ids.tolist() in near, f"row {row} found another beam"
        _assert_consistent(output, params.length_penalty)


def _assert_consistent(output: SampleOutput, penalty: float) -> None:
    length = len(output.token_ids)
    assert output.score == pytest.approx(output.cumulative_logprob / length**penalty)
    assert output.finish_reason == ("stop" if output.token_ids[-1] in EOS else "length")


def compare_with_transformers(width: int, penalty: float, checkpoint) -> None:
    completions, _ = run(checkpoint("llama"), Setup(), searches(width, penalty, NUM_PROMPTS))
    assert len(completions) == NUM_PROMPTS
    for completion in completions.values():
        assert_found("llama", completion)


@pytest.mark.parametrize(("width", "penalty"), SOME[:1])
def test_beams_equal_transformers(width: int, penalty: float, checkpoint) -> None:
    compare_with_transformers(width, penalty, checkpoint)


@pytest.mark.long
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_beams_equal_transformers_for_every_width_and_penalty(
    width: int, penalty: float, checkpoint
) -> None:
    compare_with_transformers(width, penalty, checkpoint)


@pytest.mark.parametrize(
    "searched",
    [
        [SOME[:2]],
        pytest.param([SOME, *([(width, 1.0)] for width in WIDTHS)], marks=pytest.mark.long),
    ],
    ids=["some", "every_width"],
)
def test_some_beams_end_early_and_some_do_not(searched: list[list[tuple[int, float]]]) -> None:
    """The tests above need beams that end early and beams that do not."""
    for some in searched:
        found = [reference("llama", row, *one) for one in some for row in range(NUM_PROMPTS)]
        lengths = [len(token_ids) for beams in found for token_ids, _ in beams]
        assert sum(length < OUTPUT_TOKENS for length in lengths) > len(lengths) // 10
        assert lengths.count(OUTPUT_TOKENS) > len(lengths) // 10


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "mistral"])
def test_beam_search_with_sliding_windows_and_sinks(family: str, checkpoint) -> None:
    completions, _ = run(checkpoint(family), Setup(block_size=4), searches(4, 1.0, 6))
    for completion in completions.values():
        assert_found(family, completion)


@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen3_5_text", "zamba2"))],
)
def test_beams_of_recurrent_layers_copy_states(family: str, checkpoint) -> None:
    """A group that is preempted forks again from the state at its common prefix."""
    model = checkpoint(family)
    num_blocks = 8 * model.layout(4).slots_per_state + 24  # enough for two groups until they grow
    small = Setup(block_size=4, num_blocks=num_blocks, misleading=True)
    for setup in (Setup(), replace(small, max_tokens=9), replace(small, runs_ahead=True)):
        completions, steps = run(model, setup, searches(4, 1.0, 4))
        for completion in completions.values():
            assert_found(family, completion)
        assert (sum(step.num_preempted for step in steps) > 0) == setup.misleading


SETUPS = {
    "chunks_of_9": Setup(max_tokens=9),
    "block_size_1": Setup(block_size=1, num_blocks=4096),
    "one_ahead": Setup(runs_ahead=True),
    "small_pool": SMALL_POOL,
    "small_pool_one_ahead": replace(SMALL_POOL, runs_ahead=True),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_beams_do_not_depend_on_the_kv_pool_size(setup: Setup, checkpoint) -> None:
    completions, steps = run(checkpoint("llama"), setup, searches(4, 1.0, 16))
    for completion in completions.values():
        assert_found("llama", completion)
    assert (sum(step.num_preempted for step in steps) > 0) == setup.misleading
    assert (sum(step.cow_copies for step in steps) > 16) == (setup.block_size > 1)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_beams_do_not_depend_on_other_rows(runs_ahead: bool, checkpoint) -> None:
    """Searches of several widths run together with sampled rows that return log-probabilities."""
    plain = SamplingParams(max_tokens=OUTPUT_TOKENS, n=2, seed=1, logprobs=3)
    kinds = [searches(2, 2.0, 1)[0], plain, searches(4, 1.0, 1)[0], searches(8, 0.0, 1)[0]]
    params = [kinds[row % 4] for row in range(24)]
    setup = Setup(runs_ahead=runs_ahead)
    completions, _ = run(checkpoint("llama"), setup, params)
    others = [plain] * 24
    alone, _ = run(checkpoint("llama"), setup, others)
    for row, completion in completions.items():
        if params[row] is not plain:
            assert_found("llama", completion)
            continue
        for output, same in zip(completion.outputs, alone[row].outputs, strict=True):
            assert output.token_ids.tolist() == same.token_ids.tolist()
            assert output.logprobs is not None
            assert [len(token.top) for token in output.logprobs] == [3] * len(output.token_ids)


def test_four_beams_take_half_the_blocks_of_four_sequences(checkpoint) -> None:
    """Beams share the blocks of 256 prompt tokens, and fork late in the 64 output tokens."""
    rng = np.random.default_rng(3)
    request = Request(
        0,
        rng.integers(25, VOCAB_SIZE, 256).astype(np.int32),
        SamplingParams(max_tokens=64, beam_width=4, n=4, ignore_eos=True),
        (0, 0),
    )
    loaded = checkpoint("llama")
    cache = KVCache(loaded.layout(16), 128, CPU, torch.float32)
    pool = BlockPool(128, 16, enable_prefix_caching=True)
    scheduler = Scheduler(pool, SequenceTable(8, loaded.max_model_len, 16), 512)
    engine = Engine(scheduler, ModelRunner(loaded.model, cache, Sampler()))
    engine.add_request(request)
    peak, done = 0, []
    while engine.num_unfinished:
        outcome = engine.step()
        peak = max(peak, outcome.stats.kv_blocks_used if outcome.stats else 0)
        done += outcome.completions
    separate = 4 * -(-(256 + 64) // 16)
    assert done[0].stats.peak_blocks == peak <= separate // 2
