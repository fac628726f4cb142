"""Recurrent states are saved where rows branch, so that no shared prefix is computed twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.request import Request
from batchinfer.requests.branch_points import MIN_GAIN, with_branch_points
from tests.engine.fake import MakeEngine, expected, make_request, run_all
from tests.engine.prompt_trees import common, planned, tree


def requests_of(prompts: list[list[int]], **params: object) -> list[Request]:
    points = planned(prompts, list(range(len(prompts))))
    return [
        replace(make_request(row, prompt, **params), branch_points=points.get(row, ()))
        for row, prompt in enumerate(prompts)
    ]


def test_branch_points_of_a_tree() -> None:
    system, other = [1] * 20, [2] * 9
    prompts = [
        [*system, *other, 3, 4],
        [*system, *other, 5, 6],
        [*system, 7, 7, 7],
        [*system, 8],
        [9] * 40,
        [9] * 40,
    ]
    assert planned(prompts, [0, 1, 2, 3, 4, 5]) == {
        0: ((20, 2), (29, 1)),
        4: ((39, 1),),  # equal prompts share all but the last token, whose logits are needed
    }
    assert planned(prompts, [3, 2, 1, 0, 5, 4]) == {3: ((20, 2),), 1: ((29, 1),), 5: ((39, 1),)}


@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=24), min_size=1, max_size=8),
    data=st.data(),
)
def test_branch_points_are_where_later_rows_part(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    run = data.draw(st.permutations(range(len(prompts))))
    points = planned(prompts, run)
    for turn, row in enumerate(run):
        for at, followers in points.get(row, ()):
            sharing = [
                later for later in run[turn + 1 :] if common(prompts[row], prompts[later]) >= at
            ]
            assert 0 < followers <= len(sharing)
            earlier = [common(prompts[row], prompts[before]) for before in run[:turn]]
            assert at > max(earlier, default=0) - 1
        starts = [at for before in run[:turn] for at, _ in points.get(before, ())
                  if common(prompts[row], prompts[before]) >= at]  # fmt: skip
        shared = max((common(prompts[row], prompts[before]) for before in run[:turn]), default=0)
        # A row finds a state that is at most a few tokens shorter than its longest shared prefix.
        assert min(shared, len(prompts[row]) - 1) - max(starts, default=0) < 2 * MIN_GAIN


def test_requests_of_other_adapters_share_nothing() -> None:
    prompt = list(range(1, 30))
    requests = [
        replace(make_request(row, [*prompt, row], max_tokens=1), adapter=adapter)
        for row, adapter in enumerate([0, 1, 1, 2])
    ]
    points = [request.branch_points for request in with_branch_points(requests)]
    assert points == [(), ((29, 1),), (), ()]
    assert with_branch_points([]) == []


def test_no_states_are_kept_for_requests_that_need_logits_of_their_whole_prompts(
    make_engine: MakeEngine,
) -> None:
    prompt = list(range(1, 30))
    scored = [make_request(row, [*prompt, row + 50], prompt_logprobs=0) for row in range(2)]
    others = [make_request(row, [*prompt, row + 50]) for row in range(2, 4)]
    requests = with_branch_points([*scored, *others])
    assert [request.branch_points for request in requests] == [(), (), ((29, 1),), ()]
    engine, runner = make_engine(100, 4, slots_per_state=3)
    points = ((12, 1),)  # from a plan that does not know which logits are needed
    run_all(engine, [replace(scored[0], branch_points=points)])
    assert runner.steps[0].num_tokens == 30
    assert not engine.scheduler.pool.states.snapshots


def test_samples_with_own_states_leave_room_for_another_row(
    make_engine: MakeEngine,
) -> None:
    # There is room for three rows with a block and a state each, but not for a fourth state.
    engine, _ = make_engine(3 * (1 + 5) + 2, 32, slots_per_state=5)
    engine.add_request(make_request(0, [1] * 8, max_tokens=20, n=2, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.add_request(make_request(1, [2] * 8, max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.num_running == 3


def test_prefix_of_a_kept_state_outlives_unshared_prompts(
    make_engine: MakeEngine,
) -> None:
    first = list(range(1, 101))
    others = [[1000 * row + at for at in range(100)] for row in range(1, 4)]
    prompts = [[*first, 1], *others, [*first, 2]]
    engine, _ = make_engine(70, 4, slots_per_state=3, max_num_seqs=1, max_tokens=256)
    rows = [make_request(row, prompt, max_tokens=3) for row, prompt in enumerate(prompts)]
    completions, _ = run_all(engine, with_branch_points(rows))
    assert completions[4].stats.cached_tokens == 100


@pytest.mark.parametrize("block_size", [4, 16])
def test_prompts_of_a_tree_are_computed_once(make_engine: MakeEngine, block_size: int) -> None:
    prompts = tree((4, 4, 32), (137, 61, 43, 19))  # 512 rows, branches at odd positions
    distinct = 137 + 4 * 61 + 16 * 43 + 512 * 19
    engine, _ = make_engine(
        40_000 // block_size, block_size, max_tokens=256, slots_per_state=9, max_num_seqs=64
    )
    requests = requests_of(prompts, max_tokens=3)
    completions, steps = run_all(engine, requests)
    for row, completion in completions.items():
        assert completion.outputs[0].token_ids.tolist() == expected(requests[row], 0)
    assert sum(step.prefill_tokens for step in steps) <= 1.01 * distinct
    assert not engine.scheduler.pool.states.snapshots, "a snapshot outlived its last follower"


@pytest.mark.parametrize(("n", "num_states"), [(1, 5), (1, 32), (4, 24)])
def test_prompts_are_computed_once_in_a_pool_full_of_states(
    make_engine: MakeEngine, n: int, num_states: int
) -> None:
    prompts = tree((4, 4, 8), (137, 61, 43, 19))
    distinct = 137 + 4 * 61 + 16 * 43 + 128 * 19
    engine, _ = make_engine(num_states, 4, max_tokens=1024, slots_per_state=1, windows=())
    _, steps = run_all(engine, requests_of(prompts, max_tokens=3, n=n))
    assert sum(step.prefill_tokens for step in steps) == distinct
    assert max(step.kv_blocks_used for step in steps) >= 0.8 * num_states


def test_waiting_samples_do_not_displace_a_prefix_that_many_rows_share(
    make_engine: MakeEngine,
) -> None:
    """In a pool of 8 states, samples of rows wait. Up to 63 rows need the state of the shared
    prefix, but only a row's own samples need the state of its whole prompt."""
    prompts = tree((1, 1, 64), (60, 0, 0, 7))
    distinct = 60 + 64 * 7
    engine, _ = make_engine(8, 4, max_tokens=1024, slots_per_state=1, windows=())
    requests = requests_of(prompts, max_tokens=9, n=4, ignore_eos=True)
    _, steps = run_all(engine, requests)
    assert sum(step.prefill_tokens for step in steps) <= 3 * distinct


@pytest.mark.parametrize("windows", [(), (0, 9), (0, 2, 30), (9,)])
def test_prompts_of_a_tree_are_computed_once_with_windows(
    make_engine: MakeEngine, windows: tuple[int, ...]
) -> None:
    prompts = tree((2, 2, 4), (37, 21, 13, 7))
    distinct = 37 + 2 * 21 + 4 * 13 + 16 * 7
    # There are slots for all tokens but not for all windows, so slots without a snapshot are freed.
    engine, _ = make_engine(150, 4, max_tokens=16, slots_per_state=3, windows=windows)
    requests = requests_of(prompts, max_tokens=3)
    completions, steps = run_all(engine, requests)
    for row, completion in completions.items():
        assert completion.outputs[0].token_ids.tolist() == expected(requests[row], 0)
    assert sum(step.prefill_tokens for step in steps) == distinct
    assert not engine.scheduler.pool.states.snapshots


def test_slots_outside_the_windows_of_snapshots_are_evicted_first(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(60, 4, slots_per_state=3, windows=(0, 5))
    prompt = list(range(1, 42))
    run_all(engine, [replace(make_request(0, prompt, max_tokens=1), branch_points=((30, 2),))])
    pool = engine.scheduler.pool
    (snapshot,) = pool.states.snapshots
    (before,) = snapshot.in_windows
    assert before == 2
    node, wanted = snapshot.block, []
    while node.window_slots:
        assert node.wanted
        wanted.append(node.window_slots[0].wanted)
        node = node.parent
    assert wanted == [True, True, *[False] * 6]


def test_snapshot_that_lacks_its_window_is_not_found(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(90, 4, slots_per_state=3, windows=(0, 5))
    prompt = list(range(1, 42))
    first = replace(make_request(0, prompt, max_tokens=1), branch_points=((18, 2), (30, 2)))
    run_all(engine, [first])
    pool = engine.scheduler.pool
    last = max(pool.states.snapshots, key=lambda snapshot: snapshot.key)
    pool.window_slots.free(last.block.parent.window_slots[0])
    second = make_request(1, [*prompt[:35], 99], max_tokens=2)
    completions, _ = run_all(engine, [second])
    assert completions[1].stats.cached_tokens == 18
    assert completions[1].outputs[0].token_ids.tolist() == expected(second, 0)


@pytest.mark.parametrize("windows", [(0,), (0, 9)])
def test_pools_too_small_for_snapshots_run_all_rows(
    make_engine: MakeEngine, windows: tuple[int, ...]
) -> None:
    prompts = tree((2, 2, 4), (21, 13, 9, 7))
    engine, _ = make_engine(34, 4, max_tokens=16, slots_per_state=5, windows=windows)
    requests = requests_of(prompts, max_tokens=5, n=2)
    completions, _ = run_all(engine, requests)
    for row, completion in completions.items():
        for output in completion.outputs:
            assert output.token_ids.tolist() == expected(requests[row], output.index)


def test_waiting_samples_start_from_the_state_of_their_prompt(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(200, 4, max_num_seqs=2, slots_per_state=3)
    request = make_request(0, list(range(1, 42)), max_tokens=4, n=6)
    completions, steps = run_all(engine, [request])
    for output in completions[0].outputs:
        assert output.token_ids.tolist() == expected(request, output.index)
    assert sum(step.prefill_tokens for step in steps) == 41


def test_followers_use_the_snapshot_of_a_preempted_row(
    make_engine: MakeEngine,
) -> None:
    prompt = list(range(1, 41))
    first, second = (make_request(row, [*prompt, *[row] * 4], max_tokens=5) for row in (1, 2))
    engine, _ = make_engine(200, 4, slots_per_state=3, max_num_seqs=1)
    for request in (replace(first, branch_points=((40, 1),)), second):
        engine.add_request(request)
    engine.step()
    assert engine.scheduler.pool.states.snapshots
    engine.scheduler.preempt(next(engine.scheduler.table.running()))
    completions, _ = run_all(engine, [])
    assert completions[1].stats.recomputed_tokens == 0
    assert completions[2].stats.cached_tokens == 40
    assert not engine.scheduler.pool.states.snapshots


def test_completions_of_equal_prompts_start_from_one_state(make_engine: MakeEngine) -> None:
    prompt = list(range(1, 41))
    points = [((39, 3),), (), (), ((39, 2),), (), ()]  # two rows with three completions each
    requests = [
        replace(
            make_request(at, [*prompt, 50 + at], max_tokens=1, prompt_logprobs=0),
            scored_from=40,
            branch_points=kept,
        )
        for at, kept in enumerate(points)
    ]
    engine, _ = make_engine(400, 4, slots_per_state=3, max_num_seqs=1)
    completions, _ = run_all(engine, requests)
    assert [completions[at].stats.cached_tokens for at in range(6)] == [0, 39, 39, 39, 39, 39]
    assert not engine.scheduler.pool.states.snapshots


def test_row_is_refused_if_the_pool_is_smaller_than_a_state(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(4, slots_per_state=5, windows=())
    completions, _ = run_all(engine, [make_request(0, [1, 2, 3], max_tokens=2)])
    assert completions[0].error_code == "does_not_fit"
    assert completions[0].error_message == (
        "one sample may need 5 KV blocks, but the pool has 4; raise engine.kv_cache_memory"
    )
