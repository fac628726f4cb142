"""How the scheduler packs rows into the pool, shares prefixes and cuts chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from batchinfer.engine.request import Request
from batchinfer.engine.stats import StepStats
from batchinfer.engine.step import Step, StepResult
from tests.engine.fake import EOS, FakeRunner, MakeEngine, NextToken, make_request, run_all
from tests.engine.invariants import check_scheduler

BLOCK = 16


class TokensOnly(FakeRunner):
    """Draws tokens without keeping contexts, to make long runs fast."""

    def run(self, step: Step) -> StepResult:
        batch = step.sampling
        tokens = [
            self.next_token(b"", int(stream), int(sample), int(position))
            for stream, sample, position in zip(
                batch.stream, batch.sample_index, batch.position, strict=True
            )
        ]
        count = len(tokens)
        return StepResult(
            token_ids=np.asarray(tokens, dtype=np.int32),
            logprobs=np.zeros(count, dtype=np.float32),
            nonfinite=np.zeros(count, dtype=np.bool_),
            ranks=None,
            top_token_ids=None,
            top_logprobs=None,
        )


def run_long(
    make_engine, requests: list[Request], num_blocks: int, next_token: NextToken
) -> list[StepStats]:
    """Run requests in a pool that is too small for all of them, with no other limit."""
    engine, _ = make_engine(
        num_blocks, BLOCK, max_num_seqs=1024, max_tokens=8192, next_token=next_token
    )
    engine._runner = TokensOnly(1, 1, next_token)
    for request in requests:
        engine.add_request(request)
    steps: list[StepStats] = []
    while engine.num_unfinished:
        stats = engine.step().stats
        steps += [stats] if stats else []
    check_scheduler(engine.scheduler)
    return steps


def packing(steps: list[StepStats]) -> tuple[float, float]:
    """Return the share of blocks in use while rows wait, and the share of recomputed tokens."""
    pressed = [step for step in steps if step.num_waiting]
    used = sum(step.kv_blocks_used for step in pressed)
    available = sum(step.kv_blocks_total for step in pressed)
    computed = sum(step.prefill_tokens + step.decode_tokens for step in steps)
    return used / available, sum(step.recomputed_tokens for step in steps) / computed


def prompts(rng: np.random.Generator, lengths: np.ndarray) -> list[list[int]]:
    return [rng.integers(1, 30_000, length).tolist() for length in lengths]


def geometric(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.clip(rng.geometric(1 / 128, count), 1, 1024)


def uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(64, 193, count)


@pytest.mark.parametrize("draw_lengths", [geometric, uniform])
def test_rows_that_stop_by_themselves_pack_well(
    make_engine: MakeEngine, draw_lengths: Callable[[np.random.Generator, int], np.ndarray]
) -> None:
    rng = np.random.default_rng(0)
    count = 500
    lengths = draw_lengths(rng, count)

    def ends(context: bytes, stream: int, sample: int, position: int) -> int:
        return EOS if position == lengths[stream] - 1 else 7

    requests = [
        make_request(row, prompt, max_tokens=1024)
        for row, prompt in enumerate(prompts(rng, rng.integers(100, 601, count)))
    ]
    utilization, recomputed = packing(run_long(make_engine, requests, 1536, ends))
    assert utilization >= 0.94
    assert recomputed <= 0.01


def test_rows_of_known_length_pack_better(make_engine: MakeEngine) -> None:
    rng = np.random.default_rng(0)
    count = 400
    lengths = rng.integers(16, 257, count)
    requests = [
        make_request(row, prompt, max_tokens=int(length), ignore_eos=True)
        for row, (prompt, length) in enumerate(
            zip(prompts(rng, rng.integers(16, 257, count)), lengths, strict=True)
        )
    ]
    utilization, recomputed = packing(run_long(make_engine, requests, 1024, lambda *_: 7))
    assert utilization >= 0.96
    assert recomputed <= 0.01


def test_waste_is_the_unfilled_part_of_last_blocks(make_engine: MakeEngine) -> None:
    rng = np.random.default_rng(0)
    requests = [
        make_request(row, prompt, max_tokens=128, ignore_eos=True)
        for row, prompt in enumerate(prompts(rng, rng.integers(200, 401, 200)))
    ]
    steps = run_long(make_engine, requests, 1024, lambda *_: 7)
    assert np.mean([step.kv_waste for step in steps]) <= 0.04


@pytest.mark.parametrize(
    ("block_size", "max_tokens"), [(1, 64), (1, 8192), (16, 512), (32, 64), (32, 8192)]
)
def test_each_distinct_prefix_token_is_computed_once(
    make_engine: MakeEngine, block_size: int, max_tokens: int
) -> None:
    rng = np.random.default_rng(0)
    common = rng.integers(1, 30_000, 500).tolist()
    requests = [
        make_request(row, common + own, max_tokens=4)
        for row, own in enumerate(prompts(rng, np.full(64, 32)))
    ]
    engine, _ = make_engine(
        20_000 // block_size, block_size, max_num_seqs=256, max_tokens=max_tokens
    )
    _, steps = run_all(engine, requests)
    assert sum(step.prefill_tokens for step in steps) == 500 + 64 * 32


def test_rows_with_several_prefixes_share_each(make_engine: MakeEngine) -> None:
    rng = np.random.default_rng(1)
    systems = rng.integers(1, 30_000, (5, 300))
    requests = [
        make_request(row, [1, *systems[row % 5].tolist(), *own], max_tokens=4)
        for row, own in enumerate(prompts(rng, rng.integers(5, 60, 100)))
    ]
    engine, _ = make_engine(4096, BLOCK, max_num_seqs=256, max_tokens=2048)
    _, steps = run_all(engine, requests)
    distinct = 1 + 5 * 300 + sum(request.num_prompt_tokens - 301 for request in requests)
    assert sum(step.prefill_tokens for step in steps) <= 1.01 * distinct


def test_sorted_neighbors_start_together(make_engine: MakeEngine) -> None:
    """Neighbors share slightly more tokens with each other than with all other rows."""
    rng = np.random.default_rng(6)
    common = rng.integers(1, 30_000, 300).tolist()
    rows = sorted(
        [*common, *rng.integers(1, 5, 6).tolist(), *own] for own in prompts(rng, np.full(100, 40))
    )
    engine, _ = make_engine(4096, BLOCK, max_num_seqs=256, max_tokens=8192)
    requests = [make_request(row, prompt, max_tokens=4) for row, prompt in enumerate(rows)]
    _, steps = run_all(engine, requests)
    assert steps[3].num_running >= 90
    assert sum(step.prefill_tokens for step in steps) <= 300 + 100 * 46


def test_a_follower_does_not_wait_for_a_single_common_token(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(100, BLOCK, max_tokens=2048)
    rng = np.random.default_rng(2)
    requests = [
        make_request(row, [1, *own], max_tokens=2)
        for row, own in enumerate(prompts(rng, np.full(8, 50)))
    ]
    _, steps = run_all(engine, requests)
    assert steps[0].num_running == 8


@pytest.mark.parametrize("num_blocks", [4096, 600, 100])
def test_prompts_of_parallel_samples_are_computed_once_in_any_pool(
    make_engine: MakeEngine, num_blocks: int
) -> None:
    rng = np.random.default_rng(3)
    requests = [
        make_request(row, prompt, max_tokens=64, n=8, ignore_eos=True)
        for row, prompt in enumerate(prompts(rng, np.full(16, 133)))
    ]
    steps = run_long(make_engine, requests, num_blocks, lambda *_: 7)
    assert sum(step.prefill_tokens for step in steps) == 16 * 133
    assert sum(step.recomputed_tokens for step in steps) == 0


def test_sharing_saves_what_block_arithmetic_says(make_engine: MakeEngine) -> None:
    # 128 prompt tokens fill 8 blocks of 16; 63 output tokens with KV take up to 4 more per sample.
    rng = np.random.default_rng(4)
    requests = [
        make_request(row, prompt, max_tokens=64, n=8, ignore_eos=True)
        for row, prompt in enumerate(prompts(rng, np.full(32, 128)))
    ]
    steps = run_long(make_engine, requests, 4096, lambda *_: 7)
    for step in steps[1:]:
        own = -(-(step.kv_tokens_logical // 256 - 128) // BLOCK)
        assert step.kv_blocks_used == 32 * (8 + 8 * own)
        assert step.kv_logical_blocks == 32 * 8 * (8 + own)


def test_a_step_keeps_to_its_token_budget(make_engine: MakeEngine) -> None:
    rng = np.random.default_rng(5)
    requests = [
        make_request(row, prompt, max_tokens=8)
        for row, prompt in enumerate(prompts(rng, rng.integers(1, 90, 30)))
    ]
    engine, runner = make_engine(400, BLOCK, max_tokens=20)
    run_all(engine, requests)
    assert max(step.num_tokens for step in runner.steps) == 20
