from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.worker.attention.torch_cpu import Plan, make_plan
from batchinfer.worker.kv_cache import KVCache
from tests.worker.step_maker import StepMaker

BLOCK_SIZE = 4


def make_cache(num_blocks: int = 2048, element_bytes: int = 4) -> KVCache:
    layout = KVLayout(1, 1, 2, 2, BLOCK_SIZE, element_bytes)
    return KVCache(layout, num_blocks, torch.device("cpu"), torch.float32)


def plan_of(parts: list[tuple[int, int]], window: int = 0) -> tuple[Plan, int]:
    """Return the plan of sequences given as (tokens computed before, tokens in this step)."""
    maker = StepMaker(2048, BLOCK_SIZE)
    rows = []
    for computed, count in parts:
        sequence = maker.sequence([0] * (computed + count))
        if computed:
            maker.step([(sequence, computed)])
        rows.append((sequence, count))
    step = maker.step(rows)
    return make_plan(step, make_cache(), window), step.num_tokens


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 150)), min_size=1, max_size=12),
    st.sampled_from([0, 1, 5, 64]),
)
def test_every_token_is_one_query_and_sees_its_window(
    parts: list[tuple[int, int]], window: int
) -> None:
    plan, num_tokens = plan_of(parts, window)
    assert plan.tokens[plan.rows].tolist() == list(range(num_tokens))
    seen = torch.cat([b.all_visible + (~b.hidden).sum(-1).flatten() for b in plan.buckets])[
        plan.rows
    ]
    positions = np.concatenate([np.arange(c, c + n) for c, n in parts])
    expected = np.minimum(positions + 1, window) if window else positions + 1
    assert seen.tolist() == expected.tolist()


def test_a_window_leaves_old_blocks_ungathered() -> None:
    plan, _ = plan_of([(200, 1)], window=6)
    assert plan.buckets[0].context == 3 * BLOCK_SIZE


def test_large_blocks_are_cut_into_buckets_of_similar_contexts() -> None:
    layout = KVLayout(1, 8, 128, 128, 16, 4)  # a block has 128 KiB, so 32 fill a bucket
    cache = KVCache(layout, 300, torch.device("cpu"), torch.float32)
    maker = StepMaker(300, 16)
    sequences = [maker.sequence([0] * (n + 1)) for n in (15, 31, 200, 220, 400, 15, 255)]
    for sequence in sequences:
        maker.step([(sequence, len(sequence.token_ids) - 1)])
    plan = make_plan(maker.step([(sequence, 1) for sequence in sequences]), cache, 0)
    gathered = sum(bucket.num_tiles * bucket.context for bucket in plan.buckets)
    needed = sum(-(-len(sequence.token_ids) // 16) * 16 for sequence in sequences)
    assert gathered <= 1.3 * needed
    assert all(bucket.num_tiles * bucket.context <= 32 * 16 for bucket in plan.buckets)
