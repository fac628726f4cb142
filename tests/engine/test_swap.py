"""Preempted blocks move to the host and back, and outputs stay the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.prefix_index import common_tokens, token_key
from batchinfer.engine.request import Request
from batchinfer.engine.stats import StepStats
from tests.engine.fake import (
    EOS,
    FakeRunner,
    MakeEngine,
    hashed,
    make_engine,
    make_request,
    run_all,
)
from tests.engine.invariants import check_scheduler
from tests.engine.prompt_trees import planned, tree
from tests.engine.searches import assert_found, beams
from tests.engine.workloads import assert_expected


def ends_late(context: bytes, stream: int, sample: int, position: int) -> int:
    """End rows 0 to 39 after 4 tokens, and later rows after 40 tokens."""
    ends = 4 if stream < 40 else 40
    return EOS if position == ends - 1 else hashed(context, stream, sample, position)


def crowd(n: int = 1) -> list[Request]:
    """Return more rows than the pool holds; the last third is longer than the engine forecasts."""
    return [make_request(row, [row + 1] * 5, max_tokens=64, n=n) for row in range(60)]


@pytest.mark.parametrize(
    ("n", "num_blocks", "host_blocks"),
    [(1, 18, 1), (1, 18, 4), (3, 18, 4), (1, 18, 1000), (1, 60, 1), (1, 60, 4)],
)
def test_rows_that_exceed_the_pool_run_with_any_host_memory(
    make_engine: MakeEngine, n: int, num_blocks: int, host_blocks: int
) -> None:
    """A pool of 18 blocks has room for only one of the longest rows."""
    engine, _ = make_engine(
        num_blocks, next_token=ends_late, host_blocks=host_blocks, preemption="swap"
    )
    completions, steps = run_all(engine, crowd(n))
    for completion in completions.values():
        assert_expected(completion, ends_late)
    assert sum(step.swapped_in_blocks for step in steps) > 0
    assert engine.scheduler.pool.host.num_used <= host_blocks


def test_nothing_is_recomputed_while_the_host_has_room(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(60, next_token=ends_late, host_blocks=1000, preemption="swap")
    completions, steps = run_all(engine, crowd())
    for completion in completions.values():
        assert_expected(completion, ends_late)
    assert sum(step.num_preempted for step in steps) > 5
    assert sum(step.swapped_out_blocks for step in steps) > 5
    assert max(step.num_swapped for step in steps) > 0
    assert sum(step.recomputed_tokens for step in steps) == 0
    preempted = [done.stats for done in completions.values() if done.stats.preemptions]
    assert all(stats.swap_preemptions == stats.preemptions for stats in preempted)


def test_preempted_rows_are_recomputed_without_swapping(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(60, next_token=ends_late, host_blocks=1000)
    completions, steps = run_all(engine, crowd())
    for completion in completions.values():
        assert_expected(completion, ends_late)
    assert sum(step.recomputed_tokens for step in steps) > 0
    assert sum(step.swapped_out_blocks for step in steps) == 0
    assert not any(done.stats.swap_preemptions for done in completions.values())


def test_beam_group_returns_from_the_host_whole(make_engine: MakeEngine) -> None:
    """Only the last token of each beam, and tokens of its last block, are computed again."""
    requests = [beams(row, [row + 1] * 6, 3, max_tokens=40) for row in range(30)]
    recomputed = {}
    for preemption in ("recompute", "swap"):
        engine, _ = make_engine(60, host_blocks=1000, preemption=preemption)
        engine.scheduler.output_lengths.observe(np.full(500, 2), np.ones(500, dtype=np.bool_))
        completions, steps = run_all(engine, requests)
        for completion in completions.values():
            assert_found(completion)
        preempted = sum(step.num_preempted for step in steps)
        assert preempted > 3
        recomputed[preemption] = sum(step.recomputed_tokens for step in steps) / preempted
    assert recomputed["swap"] <= 4
    assert recomputed["swap"] < recomputed["recompute"] / 2


def preempt_and_evict(engine: Engine) -> StepStats:
    """Preempt all sequences, overwrite all blocks, and run a step."""
    scheduler = engine.scheduler
    for sequence in list(scheduler.table.running()):
        scheduler.preempt(sequence)
    taken = [scheduler.pool.allocate() for _ in range(scheduler.pool.num_blocks)]
    scheduler.pool.release(taken)
    stats = engine.step().stats
    check_scheduler(scheduler)
    assert stats is not None
    return stats


def test_block_that_returned_is_not_copied_to_the_host_again() -> None:
    """The host still holds its contents; only the last block changed and is copied again."""
    engine, _ = make_engine(10, host_blocks=100, preemption="swap")
    engine.add_request(make_request(0, [7] * 16, max_tokens=8, ignore_eos=True))
    engine.step()
    steps = [preempt_and_evict(engine) for _ in range(4)]
    assert [step.swapped_out_blocks for step in steps] == [4, 1, 1, 1]
    assert [step.swapped_in_blocks for step in steps] == [4, 5, 5, 5]
    assert sum(step.recomputed_tokens for step in steps) == 0


def test_swapped_samples_still_share_blocks() -> None:
    engine, _ = make_engine(20, host_blocks=100, preemption="swap")
    engine.add_request(make_request(0, [7] * 16, max_tokens=8, n=3, ignore_eos=True))
    engine.step()
    engine.step()
    stats = preempt_and_evict(engine)
    assert stats.swapped_out_blocks == 4 + 3
    assert engine.num_running == 3
    assert stats.kv_blocks_used == 4 + 3


def test_copies_of_a_failed_step_are_not_used(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(60, next_token=ends_late, host_blocks=1000, preemption="swap")
    for request in crowd():
        engine.add_request(request)
    while not (runner.steps and len(runner.steps[-1].swap_outs)):
        engine.step()
    runner.submit = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        engine.step()
    engine.abort_all()
    check_scheduler(engine.scheduler)
    assert engine.scheduler.reuse_hints.num_swapped == 0
    runner = FakeRunner(60, 4, ends_late, 1000)
    engine._runner = runner
    completions, _ = run_all(engine, [make_request(row, [90, row], max_tokens=9) for row in (1, 2)])
    for completion in completions.values():
        assert_expected(completion, ends_late)


def documents(num: int, questions: int, *, hinted: bool) -> list[Request]:
    """Return rows that ask ``questions`` times about each document, and unrelated rows.

    Args:
        hinted: whether rows have a hint that a later row asks about the same document.
    """
    requests = []
    for asked in range(questions):
        for document in range(num):
            row = asked * num + document
            prompt = [document + 1] * 24 + [100 + row]
            shared = 24 if hinted and asked + 1 < questions else 0
            request = make_request(row, prompt, max_tokens=4, ignore_eos=True)
            requests.append(replace(request, reused_prefix_len=shared))
            once = make_request(1000 + row, [500 + row] * 24, max_tokens=4, ignore_eos=True)
            requests.append(once)
    return requests


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_hints_about_later_rows_save_more_than_lru(
    make_engine: MakeEngine, host_blocks: int
) -> None:
    """Half of the rows share nothing; every tenth row asks about the same document."""
    computed, swapped = {}, {}
    for hinted in (False, True):
        engine, _ = make_engine(44, max_num_seqs=2, host_blocks=host_blocks, preemption="swap")
        completions, steps = run_all(engine, documents(5, 6, hinted=hinted))
        for completion in completions.values():
            assert_expected(completion)
        computed[hinted] = sum(step.prefill_tokens for step in steps)
        swapped[hinted] = sum(step.swapped_in_blocks for step in steps)
    once, asked = 30 * 24, 30
    assert computed[False] == 2 * once + asked, "LRU keeps nothing long enough"
    assert swapped[False] == 0
    if host_blocks:
        assert computed[True] == once + asked + 5 * 24, "each document is computed once"
    else:
        assert computed[True] < 0.85 * computed[False]


def in_prefix_order(prompts: list[list[int]]) -> list[Request]:
    """Return requests in the order of their prompts; hints say how much the next prompt shares."""
    prompts = sorted(prompts)
    common = [common_tokens(*map(token_key, pair)) for pair in pairwise(prompts)] + [0]
    return [
        replace(make_request(row, prompt, max_tokens=2, ignore_eos=True), reused_prefix_len=shared)
        for row, (prompt, shared) in enumerate(zip(prompts, common, strict=True))
    ]


def in_rounds(prompts: list[list[int]], rounds: int) -> list[Request]:
    """Return requests for all prompts, several times; hints say that prompts come again."""
    return [
        replace(
            make_request(at * len(prompts) + number, prompt, max_tokens=2, ignore_eos=True),
            reused_prefix_len=len(prompt) if at + 1 < rounds else 0,
        )
        for at in range(rounds)
        for number, prompt in enumerate(prompts)
    ]


def test_short_prefixes_are_not_copied_to_the_host(make_engine: MakeEngine) -> None:
    """Neighboring rows share only a token or two, so copying a block does not pay off."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 9, rng.integers(4, 12)).tolist() for _ in range(300)]
    engine, _ = make_engine(24, max_num_seqs=4, host_blocks=500, preemption="auto", block_size=8)
    _, steps = run_all(engine, in_prefix_order(prompts))
    assert sum(step.cached_tokens for step in steps) > 0
    assert sum(step.swapped_out_blocks for step in steps) == 0


@pytest.mark.parametrize("scored_from", [1, 13])
def test_blocks_of_scored_tokens_are_not_copied_to_the_host(
    make_engine: MakeEngine, scored_from: int
) -> None:
    """Rows need logits of all tokens from ``scored_from`` on, so they can share only earlier
    blocks."""
    groups = [[group + 1] * 24 + [100] for group in range(20)]
    rows = [replace(request, scored_from=scored_from) for request in in_rounds(groups, rounds=3)]
    rows = [replace(row, params=replace(row.params, prompt_logprobs=1)) for row in rows]
    engine, _ = make_engine(24, max_num_seqs=2, host_blocks=500, preemption="auto")
    _, steps = run_all(engine, rows)
    taken = 20 * (scored_from - 1) // 4
    assert sum(step.swapped_out_blocks for step in steps) == taken
    assert sum(step.swapped_in_blocks for step in steps) >= taken
    assert not any(block.wanted for block in engine.scheduler.pool.index.blocks())


def test_hints_of_further_samples_keep_no_blocks_for_rows_that_have_run(
    make_engine: MakeEngine,
) -> None:
    """The further samples arrive after all other rows; their hints are about rows that have run."""
    rows = in_rounds([[group + 1] * 24 + [100] for group in range(20)], rounds=2)
    further = [replace(row, first_sample=1, number=1) for row in rows[:20]]
    engine, _ = make_engine(24, max_num_seqs=2, host_blocks=500, preemption="auto")
    run_all(engine, rows)
    _, steps = run_all(engine, further)
    assert sum(step.swapped_out_blocks for step in steps) == 0
    assert not any(block.wanted for block in engine.scheduler.pool.index.blocks())


def test_a_partly_copied_block_stays_for_rows_that_need_all_of_it(
    make_engine: MakeEngine,
) -> None:
    """A group's first row copies tokens that its first block shares with another group's block."""
    groups = [[500, 500, 500, group] + [group] * 20 + [100] for group in range(1, 21)]
    engine, _ = make_engine(24, max_num_seqs=1, host_blocks=500, preemption="auto")
    _, steps = run_all(engine, in_rounds(groups, rounds=3))
    assert sum(step.cow_copies for step in steps) > 10
    # Each group is computed once, except for copied tokens; later rows compute only a last token.
    computed = sum(step.prefill_tokens for step in steps)
    assert computed <= 20 * 25 + 2 * 20
    assert sum(step.swapped_out_blocks for step in steps) == 20 * 6


def test_prefixes_return_from_the_host_for_later_rows(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(16, max_num_seqs=1, host_blocks=64, preemption="auto")
    completions, steps = run_all(engine, documents(5, 6, hinted=True))
    for completion in completions.values():
        assert_expected(completion)
    assert sum(step.prefill_tokens for step in steps) == 30 * 24 + 30 + 5 * 24
    assert sum(step.swapped_in_blocks for step in steps) > 100
    # Each block is copied out once: it keeps its host slot when it returns.
    assert sum(step.swapped_out_blocks for step in steps) == 5 * 6
    # No row waits for a document after the last question about it.
    assert not any(block.wanted for block in engine.scheduler.pool.index.blocks())


def test_host_memory_is_used_again_before_new_memory(make_engine: MakeEngine) -> None:
    """Each window has different documents, which reuse the host slots of the previous window."""
    engine, runner = make_engine(16, max_num_seqs=1, host_blocks=500, preemption="auto")
    touched = []
    for window in range(4):
        rows = documents(5, 6, hinted=True)
        ids = [row.prompt_token_ids + 2000 * window for row in rows]
        run_all(engine, [replace(r, prompt_token_ids=i) for r, i in zip(rows, ids, strict=True)])
        slots = [slot for step in runner.steps for slot in step.swap_outs[:, 1].tolist()]
        touched.append(len(set(slots)))
    assert touched == [5 * 6] * 4


@pytest.mark.parametrize("n", [1, 3])
def test_states_of_preempted_rows_move_to_the_host_and_back(
    make_engine: MakeEngine, n: int
) -> None:
    engine, _ = make_engine(
        60, next_token=ends_late, host_blocks=1000, preemption="swap", slots_per_state=3
    )
    completions, steps = run_all(engine, crowd(n))
    for completion in completions.values():
        assert_expected(completion, ends_late)
    assert sum(step.num_preempted for step in steps) > 5
    assert max(step.num_swapped for step in steps) > 0
    assert sum(step.swapped_out_blocks for step in steps) > 5
    assert sum(step.recomputed_tokens for step in steps) == 0
    assert not engine.scheduler.pool.states.snapshots
    preempted = [done.stats for done in completions.values() if done.stats.swap_preemptions]
    assert all(stats.swapped_blocks > 0 for stats in preempted)


@pytest.mark.parametrize("host_blocks", [1, 3, 4, 7])
def test_rows_with_states_run_with_any_host_memory(
    make_engine: MakeEngine, host_blocks: int
) -> None:
    engine, _ = make_engine(
        40, next_token=ends_late, host_blocks=host_blocks, preemption="swap", slots_per_state=3
    )
    completions, steps = run_all(engine, crowd(n=2))
    for completion in completions.values():
        assert_expected(completion, ends_late)
    assert engine.scheduler.pool.host.num_used <= host_blocks
    assert (sum(step.swapped_in_blocks for step in steps) > 0) == (host_blocks >= 3)


@pytest.mark.parametrize("windows", [(0,), ()])
def test_planned_snapshots_that_leave_the_pool_are_not_computed_again(
    make_engine: MakeEngine, windows: tuple[int, ...]
) -> None:
    """The pool holds three states; 128 rows with shared prefixes and four samples need more."""
    prompts = tree((4, 4, 8), (137, 61, 43, 19))
    distinct = 137 + 4 * 61 + 16 * 43 + 128 * 19
    points = planned(prompts, list(range(len(prompts))))
    requests = [
        replace(make_request(row, prompt, max_tokens=3, n=4), branch_points=points.get(row, ()))
        for row, prompt in enumerate(prompts)
    ]
    engine, _ = make_engine(
        220 if windows else 6,
        max_tokens=1024,
        slots_per_state=2,
        host_blocks=1000,
        preemption="swap",
        windows=windows,
    )
    completions, steps = run_all(engine, requests)
    for completion in completions.values():
        assert_expected(completion)
    assert sum(step.prefill_tokens for step in steps) == distinct
