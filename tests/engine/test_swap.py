"""Blocks that are given up go to the host, come back, and change nothing but what is computed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.prefix_index import common_tokens, token_key
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.scheduler.preemption import Preemption
from batchinfer.engine.stats import StepStats
from tests.engine.fake import (
    EOS,
    FakeRunner,
    MakeEngine,
    expected,
    hashed,
    make_engine,
    make_request,
    run_all,
)
from tests.engine.invariants import check_scheduler
from tests.engine.searches import assert_found, beams


def ends_late(context: bytes, stream: int, sample: int, position: int) -> int:
    """Rows from the fortieth on run ten times longer than those before them have shown."""
    ends = 4 if stream < 40 else 40
    return EOS if position == ends - 1 else hashed(context, stream, sample, position)


def crowd(n: int = 1) -> list[Request]:
    """More rows than fit, and of half of them the forecast does not know how long they get."""
    return [make_request(row, [row + 1] * 5, max_tokens=64, n=n) for row in range(60)]


def assert_expected(completions: dict[int, Completion], next_token=ends_late) -> None:
    for completion in completions.values():
        for output in completion.outputs:
            tokens = expected(completion.request, output.index, next_token)
            assert output.token_ids.tolist() == tokens


def run_preempting(
    engine: Engine, requests: list[Request], every: int, most: int = 60
) -> tuple[dict[int, Completion], list[StepStats]]:
    """Run all; the newest sequence loses its blocks now and then, in whatever state it is."""
    for request in requests:
        engine.add_request(request)
    completions, steps, preempted = {}, [], 0
    while engine.num_unfinished:
        outcome = engine.step()
        check_scheduler(engine.scheduler)
        completions |= {done.request.row_id: done for done in outcome.completions}
        steps += [] if outcome.stats is None else [outcome.stats]
        running = list(engine.scheduler.table.running())
        if running and len(steps) % every == 0 and preempted < most:
            preempted += engine.scheduler.preempt(running[-1])
            check_scheduler(engine.scheduler)
    return completions, steps


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Rows and searches that share prefixes; what they say of later rows may be wrong."""
    prefixes = draw(st.lists(st.lists(st.integers(1, 9), max_size=20), min_size=1, max_size=3))
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(prefixes),
                st.lists(st.integers(1, 3), min_size=1, max_size=12),
                st.integers(1, 20),
                st.sampled_from([1, 1, 3]),
                st.booleans(),
                st.integers(0, 32),
                st.sampled_from([0, 0, 1]),
            ),
            min_size=1,
            max_size=20,
        )
    )
    requests = []
    for row, (prefix, own, most, n, searches, later, adapter) in enumerate(rows):
        make = beams if searches and n > 1 else make_request
        width = (n,) if searches and n > 1 else ()
        more = {} if width else {"n": n}
        request = make(row, prefix + own, *width, max_tokens=most, ignore_eos=True, **more)
        later = min(later, len(prefix + own))
        requests.append(replace(request, reused_prefix_len=later, adapter=adapter))
    return requests


@given(
    requests=workloads(),
    block_size=st.sampled_from([1, 2, 4, 16]),
    pool_tokens=st.sampled_from([48, 80, 128, 512]),
    max_tokens=st.sampled_from([5, 7, 64]),
    host_blocks=st.sampled_from([0, 1, 2, 4, 16, 500]),
    preemption=st.sampled_from(["swap", "auto"]),
    caching=st.booleans(),
    every=st.sampled_from([2, 5, 1000]),
    runs_ahead=st.booleans(),
)
def test_outputs_do_not_depend_on_what_is_swapped(
    requests: list[Request],
    block_size: int,
    pool_tokens: int,
    max_tokens: int,
    host_blocks: int,
    preemption: Preemption,
    caching: bool,
    every: int,
    runs_ahead: bool,
) -> None:
    engine, _ = make_engine(
        pool_tokens // block_size,
        block_size,
        max_tokens=max_tokens,
        caching=caching,
        host_blocks=host_blocks,
        preemption=preemption,
        runs_ahead=runs_ahead,
    )
    if runs_ahead:
        completions, steps = run_all(engine, requests)
    else:
        completions, steps = run_preempting(engine, requests, every)
    ran = [c for c in completions.values() if c.error_code is None]
    for completion in ran:
        if completion.request.params.beam_width:
            assert_found(completion)
        else:
            assert_expected({0: completion}, hashed)
    assert len(completions) == len(requests)
    assert engine.scheduler.pool.num_used == 0
    swapped = sum(completion.stats.swapped_blocks for completion in ran)
    assert sum(step.swapped_in_blocks for step in steps) == swapped
    assert steps == [] or max(step.swapped_out_blocks for step in steps) <= max(
        host_blocks, pool_tokens // block_size
    )


@pytest.mark.parametrize(
    ("n", "num_blocks", "host_blocks"),
    [(1, 18, 1), (1, 18, 4), (3, 18, 4), (1, 18, 1000), (1, 60, 1), (1, 60, 4)],
)
def test_a_crowd_is_served_whatever_the_host_holds(
    make_engine: MakeEngine, n: int, num_blocks: int, host_blocks: int
) -> None:
    """A pool of 18 blocks holds one row of the longest."""
    engine, _ = make_engine(
        num_blocks,
        next_token=ends_late,
        host_blocks=host_blocks,
        preemption="swap",
    )
    completions, steps = run_all(engine, crowd(n))
    assert_expected(completions)
    assert sum(step.swapped_in_blocks for step in steps) > 0
    assert engine.scheduler.pool.host.num_used <= host_blocks


def test_with_room_on_the_host_nothing_is_recomputed(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(60, next_token=ends_late, host_blocks=1000, preemption="swap")
    completions, steps = run_all(engine, crowd())
    assert_expected(completions)
    assert sum(step.num_preempted for step in steps) > 5
    assert sum(step.swapped_out_blocks for step in steps) > 5
    assert max(step.num_swapped for step in steps) > 0
    assert sum(step.recomputed_tokens for step in steps) == 0
    preempted = [done.stats for done in completions.values() if done.stats.preemptions]
    assert all(stats.swap_preemptions == stats.preemptions for stats in preempted)


def test_without_it_what_was_given_up_is_recomputed(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(60, next_token=ends_late, host_blocks=1000)
    completions, steps = run_all(engine, crowd())
    assert_expected(completions)
    assert sum(step.recomputed_tokens for step in steps) > 0
    assert sum(step.swapped_out_blocks for step in steps) == 0
    assert not any(done.stats.swap_preemptions for done in completions.values())


def test_a_group_comes_back_from_the_host_whole(make_engine: MakeEngine) -> None:
    """All that is computed again is the token before the last of each beam, and of its block."""
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
    """Take the running sequences' blocks, use them all for something else, and run a step."""
    scheduler = engine.scheduler
    for sequence in list(scheduler.table.running()):
        scheduler.preempt(sequence)
    taken = [scheduler.pool.allocate() for _ in range(scheduler.pool.num_blocks)]
    scheduler.pool.release(taken)
    stats = engine.step().stats
    check_scheduler(scheduler)
    assert stats is not None
    return stats


def test_a_block_that_came_back_is_not_copied_out_again() -> None:
    """Its host slot still holds it; only the last block, which is written on, is copied anew."""
    engine, _ = make_engine(10, host_blocks=100, preemption="swap")
    engine.add_request(make_request(0, [7] * 16, max_tokens=8, ignore_eos=True))
    engine.step()
    steps = [preempt_and_evict(engine) for _ in range(4)]
    assert [step.swapped_out_blocks for step in steps] == [4, 1, 1, 1]
    assert [step.swapped_in_blocks for step in steps] == [4, 5, 5, 5]
    assert sum(step.recomputed_tokens for step in steps) == 0


def test_samples_that_are_swapped_share_what_they_shared() -> None:
    engine, _ = make_engine(20, host_blocks=100, preemption="swap")
    engine.add_request(make_request(0, [7] * 16, max_tokens=8, n=3, ignore_eos=True))
    engine.step()
    engine.step()
    stats = preempt_and_evict(engine)
    assert stats.swapped_out_blocks == 4 + 3
    assert engine.num_running == 3
    assert stats.kv_blocks_used == 4 + 3


def test_copies_of_a_step_that_failed_are_not_found(make_engine: MakeEngine) -> None:
    """Whether they were made is not known."""
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
    assert_expected(completions)


def documents(num: int, questions: int, *, told: bool) -> list[Request]:
    """Each document is asked about several times, in rounds, so that others come between."""
    requests = []
    for asked in range(questions):
        for document in range(num):
            row = asked * num + document
            prompt = [document + 1] * 24 + [100 + row]
            shared = 24 if told and asked + 1 < questions else 0
            request = make_request(row, prompt, max_tokens=4, ignore_eos=True)
            requests.append(replace(request, reused_prefix_len=shared))
            once = make_request(1000 + row, [500 + row] * 24, max_tokens=4, ignore_eos=True)
            requests.append(once)
    return requests


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_known_future_use_beats_least_recently_used(
    make_engine: MakeEngine, host_blocks: int
) -> None:
    """Half of the rows leave nothing that is used again; documents come round after 8 rows."""
    computed, swapped = {}, {}
    for told in (False, True):
        engine, _ = make_engine(44, max_num_seqs=2, host_blocks=host_blocks, preemption="swap")
        completions, steps = run_all(engine, documents(5, 6, told=told))
        assert_expected(completions, hashed)
        computed[told] = sum(step.prefill_tokens for step in steps)
        swapped[told] = sum(step.swapped_in_blocks for step in steps)
    once, asked = 30 * 24, 30
    assert computed[False] == 2 * once + asked, "LRU keeps nothing long enough"
    assert swapped[False] == 0
    if host_blocks:
        assert computed[True] == once + asked + 5 * 24, "each document is computed once"
    else:
        assert computed[True] < 0.85 * computed[False]


def in_prefix_order(prompts: list[list[int]]) -> list[Request]:
    """The prompts sorted, each told what the next begins with as well."""
    prompts = sorted(prompts)
    common = [common_tokens(*map(token_key, pair)) for pair in pairwise(prompts)] + [0]
    return [
        replace(make_request(row, prompt, max_tokens=2, ignore_eos=True), reused_prefix_len=shared)
        for row, (prompt, shared) in enumerate(zip(prompts, common, strict=True))
    ]


def in_rounds(prompts: list[list[int]], rounds: int) -> list[Request]:
    """All prompts, again and again; each is told that it comes again."""
    return [
        replace(
            make_request(at * len(prompts) + number, prompt, max_tokens=2, ignore_eos=True),
            reused_prefix_len=len(prompt) if at + 1 < rounds else 0,
        )
        for at in range(rounds)
        for number, prompt in enumerate(prompts)
    ]


def test_short_rows_that_differ_leave_nothing_on_the_host(make_engine: MakeEngine) -> None:
    """Neighbours have a token or two in common, which is not worth a block's way there."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 9, rng.integers(4, 12)).tolist() for _ in range(300)]
    engine, _ = make_engine(24, max_num_seqs=4, host_blocks=500, preemption="auto", block_size=8)
    _, steps = run_all(engine, in_prefix_order(prompts))
    assert sum(step.cached_tokens for step in steps) > 0
    assert sum(step.swapped_out_blocks for step in steps) == 0


@pytest.mark.parametrize("scored_from", [1, 13])
def test_prompts_that_are_scored_leave_nothing_that_no_row_takes_on_the_host(
    make_engine: MakeEngine, scored_from: int
) -> None:
    """Logits are needed of every token from ``scored_from`` on, so blocks with them are computed
    again however many rows begin with them; those before are taken where they are."""
    groups = [[group + 1] * 24 + [100] for group in range(20)]
    rows = [replace(request, scored_from=scored_from) for request in in_rounds(groups, rounds=3)]
    rows = [replace(row, params=replace(row.params, prompt_logprobs=1)) for row in rows]
    engine, _ = make_engine(24, max_num_seqs=2, host_blocks=500, preemption="auto")
    _, steps = run_all(engine, rows)
    taken = 20 * (scored_from - 1) // 4
    assert sum(step.swapped_out_blocks for step in steps) == taken
    assert sum(step.swapped_in_blocks for step in steps) >= taken
    assert not any(block.wanted for block in engine.scheduler.pool.index.blocks())


def test_further_samples_of_a_row_want_nothing_for_rows_that_came_before_them(
    make_engine: MakeEngine,
) -> None:
    """They arrive when all others have run; a row of theirs was told of one that ran long since."""
    rows = in_rounds([[group + 1] * 24 + [100] for group in range(20)], rounds=2)
    further = [replace(row, first_sample=1, number=1) for row in rows[:20]]
    engine, _ = make_engine(24, max_num_seqs=2, host_blocks=500, preemption="auto")
    run_all(engine, rows)
    _, steps = run_all(engine, further)
    assert sum(step.swapped_out_blocks for step in steps) == 0
    assert not any(block.wanted for block in engine.scheduler.pool.index.blocks())


def test_a_copied_part_of_a_block_leaves_the_block_to_those_who_need_all_of_it(
    make_engine: MakeEngine,
) -> None:
    """A row that begins another group copies the tokens that this one's first block has in common
    with a block that rows to come begin with."""
    groups = [[500, 500, 500, group] + [group] * 20 + [100] for group in range(1, 21)]
    engine, _ = make_engine(24, max_num_seqs=1, host_blocks=500, preemption="auto")
    _, steps = run_all(engine, in_rounds(groups, rounds=3))
    assert sum(step.cow_copies for step in steps) > 10
    # Of each group all is computed once, but for what is copied; then the last token of each row.
    computed = sum(step.prefill_tokens for step in steps)
    assert computed <= 20 * 25 + 2 * 20
    assert sum(step.swapped_out_blocks for step in steps) == 20 * 6


def test_retired_prefixes_return_from_the_host(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(16, max_num_seqs=1, host_blocks=64, preemption="auto")
    completions, steps = run_all(engine, documents(5, 6, told=True))
    assert_expected(completions, hashed)
    assert sum(step.prefill_tokens for step in steps) == 30 * 24 + 30 + 5 * 24
    assert sum(step.swapped_in_blocks for step in steps) > 100
    # Each block goes out once: it keeps its host slot when it comes back.
    assert sum(step.swapped_out_blocks for step in steps) == 5 * 6
    # After the last question about it nobody needs a document.
    assert not any(block.wanted for block in engine.scheduler.pool.index.blocks())


def test_host_memory_serves_again_before_more_is_touched(make_engine: MakeEngine) -> None:
    """Of other documents than before, as a dataset's next window has, no more are kept than of
    these."""
    engine, runner = make_engine(16, max_num_seqs=1, host_blocks=500, preemption="auto")
    touched = []
    for window in range(4):
        rows = documents(5, 6, told=True)
        ids = [row.prompt_token_ids + 2000 * window for row in rows]
        run_all(engine, [replace(r, prompt_token_ids=i) for r, i in zip(rows, ids, strict=True)])
        slots = [slot for step in runner.steps for slot in step.swap_outs[:, 1].tolist()]
        touched.append(len(set(slots)))
    assert touched == [5 * 6] * 4
