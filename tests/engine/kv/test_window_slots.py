"""Blocks that left a window are free for other rows, and outputs stay the same."""

from __future__ import annotations

import pytest

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.layer_groups import most_in_window
from batchinfer.engine.kv.prefix_hit import find_prefix_hit
from batchinfer.engine.kv.prefix_index import token_key
from tests.engine.fake import MakeEngine, expected, make_engine, make_request, run_all
from tests.engine.invariants import check_pool
from tests.engine.searches import assert_found, beams
from tests.engine.workloads import run_preempting

SIZE = 4


def most_held(prompt: int, output: int, chunk: int, windows: tuple[int, ...]) -> int:
    """Return the most slots that a single row ever holds, counted step by step."""
    most, computed = 0, 0
    while computed < prompt + output - 1:
        num_new = min(chunk, prompt - computed) if computed < prompt else 1
        firsts = [max(computed - window + 1, 0) if window else 0 for window in windows]
        last = (computed + num_new - 1) // SIZE
        most = max(most, sum(last - first // SIZE + 1 for first in firsts))
        computed += num_new
    return most


@pytest.mark.parametrize("windows", [(0,), (9,), (0, 9), (0, 9, 9), (0, 6, 13)])
@pytest.mark.parametrize("chunk", [64, 7])
def test_a_row_holds_what_its_windows_see(
    make_engine: MakeEngine, windows: tuple[int, ...], chunk: int
) -> None:
    """90 tokens take 23 slots with full attention, but only 3 with a window of 9 tokens."""
    engine, _ = make_engine(200, max_tokens=chunk, windows=windows, caching=False)
    request = make_request(0, list(range(1, 51)), max_tokens=40, ignore_eos=True)
    completions, steps = run_all(engine, [request])
    assert completions[0].stats.peak_blocks == most_held(50, 40, chunk, windows)
    within = [23 if window == 0 else most_in_window(window, SIZE) for window in windows]
    late = [step.kv_blocks_used for step in steps[-12:]]
    assert max(late) <= sum(within)
    assert min(late) >= sum(within) - 3 * len(windows)


def test_blocks_that_left_the_window_serve_other_rows(make_engine: MakeEngine) -> None:
    """Eight rows of 23 blocks run in 40 slots: a row needs 3 slots, or up to 8 for a chunk."""
    requests = [make_request(row, [row + 1] * 50, max_tokens=40) for row in range(8)]
    engine, _ = make_engine(40, max_tokens=16, windows=(9,))
    completions, steps = run_all(engine, requests)
    for completion in completions.values():
        assert completion.outputs[0].token_ids.tolist() == expected(completion.request, 0, window=9)
    assert sum(step.num_preempted for step in steps) == 0
    assert max(step.num_running for step in steps) == 8
    assert max(step.kv_logical_blocks for step in steps) <= 40


@pytest.mark.parametrize("windows", [(9,), (0, 9)])
def test_a_prefix_hit_needs_the_last_window_only(windows: tuple[int, ...]) -> None:
    prompt = list(range(1, 41))
    engine, runner = make_engine(24, windows=windows)
    run_all(engine, [make_request(0, prompt, max_tokens=1)])
    pool = engine.scheduler.pool
    blocks = pool.match(token_key(prompt)).blocks
    for block in blocks[:7]:  # positions up to 27; after a hit of 40 tokens the window begins at 31
        pool.window_slots.free(block.window_slots[-1])
    _, steps = run_all(engine, [make_request(1, [*prompt, 7], max_tokens=1)])
    assert steps[0].cached_tokens == 40
    assert steps[0].prefill_tokens == 1
    assert steps[0].kv_blocks_used == sum(11 if window == 0 else 3 for window in windows)
    assert len(runner.steps) == 2


@pytest.mark.parametrize("windows", [(9,), (0, 9)])
def test_a_hit_without_its_window_is_shortened_and_later_repaired(windows: tuple[int, ...]) -> None:
    """Block 5 lost its window slot: a hit must end before it, or at least two blocks after it."""
    prompt = list(range(1, 33))
    engine, _ = make_engine(60, windows=windows)
    run_all(engine, [make_request(0, prompt, max_tokens=1)])
    pool = engine.scheduler.pool
    blocks = pool.match(token_key(prompt)).blocks
    pool.window_slots.free(blocks[5].window_slots[-1])
    check_pool(pool, [])
    assert find_prefix_hit(pool, pool.match(token_key(prompt))).num_tokens == 32
    assert find_prefix_hit(pool, pool.match(token_key(prompt[:31]))).num_tokens == 20
    assert find_prefix_hit(pool, pool.match(token_key(prompt)), fork_at=30).num_tokens == 20
    rows = [make_request(row, [*prompt[:28], 99, row], max_tokens=3) for row in (1, 2, 3)]
    completions, steps = run_all(engine, rows)
    assert sum(step.prefill_tokens for step in steps) == 10 + 1 + 1
    for completion in completions.values():
        window = 0 if 0 in windows else 9
        tokens = expected(completion.request, 0, window=window)
        assert completion.outputs[0].token_ids.tolist() == tokens
    assert find_prefix_hit(pool, pool.match(token_key(prompt[:31]))).num_tokens == 31


def test_index_entries_without_blocks_are_removed() -> None:
    """If all layers have windows, an index entry is removed with the last slot below it."""
    pool = BlockPool(4, SIZE, enable_prefix_caching=True, windows=(9,))
    table, parent = [pool.allocate() for _ in range(4)], pool.entry_below([])
    for at, block in enumerate(table):
        assert parent is not None
        parent = pool.insert_block(parent, block, token_key([at] * SIZE))
    pool.commit_fills()
    for block in table[:2]:
        pool.window_slots.release(block.window_slots[0])
    pool.release(table, (2,))
    check_pool(pool, [])
    taken = [pool.allocate() for _ in range(2)]
    assert [block.indexed for block in table] == [True] * 4
    check_pool(pool, [taken])
    taken += [pool.allocate() for _ in range(2)]
    assert [block.indexed for block in table] == [False] * 4
    check_pool(pool, [taken])


@pytest.mark.parametrize("windows", [(2,), (0, 2)])
@pytest.mark.parametrize("caching", [False, True])
def test_beams_that_forked_long_ago_return(windows: tuple[int, ...], caching: bool) -> None:
    """Beams are preempted and resumed although they forked more than a window ago."""
    engine, _ = make_engine(600, 1, windows=windows, max_tokens=16, caching=caching)
    request = beams(0, [3, 4, 5, 6, 7], 6, max_tokens=40, ignore_eos=True)
    completions, _ = run_preempting(engine, [request], every=7)
    assert completions[0].stats.preemptions >= 12
    assert_found(completions[0], window=0 if 0 in windows else 2)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "refused"),
    [((9,), 6, True), ((9,), 7, False), ((0, 9), 29, True), ((0, 9), 30, False)],
)
def test_a_row_that_can_never_fit_is_refused(
    windows: tuple[int, ...], num_blocks: int, refused: bool
) -> None:
    """A chunk of 16 and the 8 tokens before it span up to 7 blocks; 89 tokens fill 23 blocks."""
    engine, _ = make_engine(num_blocks, windows=windows, max_tokens=16)
    completions, _ = run_all(engine, [make_request(0, [1] * 50, max_tokens=40)])
    assert (completions[0].error_code == "does_not_fit") == refused
