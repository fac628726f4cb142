"""A beam search finds the same beams as when it runs alone, and its beams share blocks."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from batchinfer.engine.beam_search import BeamSearch
from batchinfer.engine.request import TokenLogprobs
from batchinfer.engine.step import Step, StepResult
from batchinfer.protocols import StopMatch
from tests.engine import fake
from tests.engine.fake import EOS, MakeEngine, expected, make_request, run_all
from tests.engine.invariants import check_scheduler
from tests.engine.searches import SmallToy, assert_found, beams, expected_beams
from tests.engine.toy_grammar import constrained


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_tokens", [6, 64])
def test_preempted_group_continues_whole(caching: bool, max_tokens: int) -> None:
    """Every ninth step preempts the newest group; groups with different adapters share no
    blocks."""
    requests = [
        replace(beams(row, [row // 2] * 9, 4, max_tokens=30, ignore_eos=True), adapter=row % 2)
        for row in range(6)
    ]
    engine, _ = fake.make_engine(44, block_size=4, max_tokens=max_tokens, caching=caching)
    for request in requests:
        engine.add_request(request)
    completions, preempted, steps = [], 0, 0
    while engine.num_unfinished:
        outcome = engine.step()
        check_scheduler(engine.scheduler)
        completions += outcome.completions
        steps += 1
        running = list(engine.scheduler.table.running())
        if running and steps % 9 == 0 and preempted < 60:
            group = len([beam for beam in running[-1].group if beam.row >= 0])
            assert engine.scheduler.preempt(running[-1]) == group
            assert all(beam.row < 0 for beam in running[-1].group)
            preempted += group
    assert preempted >= 40
    assert len(completions) == 6
    for completion in completions:
        assert_found(completion)
    assert engine.scheduler.pool.num_used == 0


def test_small_pool_preempts_and_finds_the_same(make_engine: MakeEngine) -> None:
    """The engine forecasts short rows, but they are long."""
    requests = [beams(row, [row + 1] * 6, 3, max_tokens=40) for row in range(30)]
    engine, _ = make_engine(num_blocks=60, block_size=4)
    engine.scheduler.output_lengths.observe(np.full(500, 2), np.ones(500, dtype=np.bool_))
    completions, steps = run_all(engine, requests)
    assert sum(step.num_preempted for step in steps) > 3
    for completion in completions.values():
        assert_found(completion)


def test_beams_that_fill_the_pool_to_the_last_block_run(make_engine: MakeEngine) -> None:
    """Three beams share the prompt's block; one writes to it and the others copy it."""
    engine, _ = make_engine(num_blocks=3, block_size=16)
    completions, steps = run_all(engine, [beams(0, [1], 3, max_tokens=9)], most_steps=20)
    assert_found(completions[0])
    assert sum(step.num_preempted for step in steps) == 0


def test_beams_take_half_the_blocks_of_separate_sequences(make_engine: MakeEngine) -> None:
    request = beams(0, list(range(1, 257)), 4, max_tokens=64, ignore_eos=True)
    engine, _ = make_engine(num_blocks=100, block_size=16, max_tokens=512)
    completions, steps = run_all(engine, [request])
    separate = 4 * -(-(256 + 64) // 16)
    assert completions[0].stats.peak_blocks <= separate // 2
    assert max(step.kv_blocks_used for step in steps) == completions[0].stats.peak_blocks
    assert max(step.kv_logical_blocks for step in steps) > separate // 2
    assert sum(step.prefill_tokens for step in steps) == 256
    assert max(step.kv_blocks_shared for step in steps) >= 16


def test_block_is_copied_when_beams_fork_in_it(make_engine: MakeEngine) -> None:
    """The prompt takes one and a half blocks; three beams need two copies of the half block."""
    engine, runner = make_engine(num_blocks=50, block_size=4)
    request = beams(0, [1, 2, 3, 4, 5, 6], 3, max_tokens=2, ignore_eos=True)
    _, steps = run_all(engine, [request])
    assert [step.cow_copies for step in steps] == [0, 2]
    assert [step.kv_blocks_used for step in steps] == [2, 1 + 3]
    assert [len(step.block_copies) for step in runner.steps] == [0, 2]


def test_table_rows_are_reserved_for_future_beams(make_engine: MakeEngine) -> None:
    """Ordinary rows do not take the table rows of future beams, so no beam is preempted."""
    rows = [make_request(row, [row] * 3, max_tokens=9) for row in range(1, 20)]
    requests = [rows[0], beams(30, [7] * 5, 4, max_tokens=8, ignore_eos=True), *rows[1:]]
    engine, _ = make_engine(num_blocks=400, max_num_seqs=6)
    completions, steps = run_all(engine, requests)
    assert_found(completions[30])
    assert completions[30].stats.preemptions == 0
    assert max(step.num_running for step in steps) == 6


def test_a_search_with_more_beams_than_max_num_seqs_runs_alone(make_engine: MakeEngine) -> None:
    """No other row or search runs at the same time, even if there is room for it."""
    requests = [make_request(row, [row] * 3, max_tokens=9) for row in range(1, 6)]
    requests[2:2] = [
        beams(row, [7] * 5, 4, max_tokens=8, ignore_eos=True, stop_token_ids=[2]) for row in (8, 9)
    ]
    engine, _ = make_engine(num_blocks=400, max_num_seqs=3)
    completions, steps = run_all(engine, requests)
    for row, completion in completions.items():
        if row in (8, 9):
            assert_found(completion)
        else:
            assert completion.outputs[0].token_ids.tolist() == expected(completion.request, 0)
        assert completion.stats.preemptions == 0
    assert {step.num_running for step in steps} <= {1, 2, 3, 4}
    assert max(step.num_running for step in steps) == 4


@pytest.mark.parametrize("max_num_seqs", [2, 64])
def test_beams_keep_to_their_grammar(make_engine: MakeEngine, max_num_seqs: int) -> None:
    """When a beam forks, its grammar state forks, too."""
    requests = [
        constrained(beams(row, [row, 1], 3, max_tokens=3 + row), SmallToy(salt=row))
        for row in range(8)
    ]
    engine, _ = make_engine(num_blocks=100, max_num_seqs=max_num_seqs)
    completions, _ = run_all(engine, requests)
    for completion in completions.values():
        assert_found(completion)
    ends = {out.finish_reason for completion in completions.values() for out in completion.outputs}
    assert ends == {"stop", "length"}


def test_grammar_that_fails_ends_only_its_search(make_engine: MakeEngine) -> None:
    broken = constrained(beams(0, [1], 3, max_tokens=9), SmallToy(longest=9, breaks_at=2))
    engine, _ = make_engine(num_blocks=100)
    completions, _ = run_all(engine, [broken, beams(1, [1], 3, max_tokens=9)])
    assert completions[0].error_code == "invalid_structured_output"
    assert completions[0].error_message == "too much work"
    assert_found(completions[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 3}, "4 beams run together, but a step has at most 3 tokens"),
        ({"num_blocks": 12}, "4 beams may need 13 KV blocks, but the pool has 12"),
    ],
)
def test_search_that_can_never_run_gets_an_error(
    make_engine: MakeEngine, settings: dict[str, int], message: str
) -> None:
    engine, _ = make_engine(**{"num_blocks": 13, **settings})
    # All beams share a block of 4 prompt tokens; each computes 12 more tokens, which take 3 blocks.
    request = beams(0, [1] * 5, 4, max_tokens=12)
    completions, _ = run_all(engine, [request])
    assert completions[0].error_code == "does_not_fit"
    assert message in str(completions[0].error_message)


def test_search_that_just_fits_runs(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=13, max_num_seqs=4, max_tokens=4)
    completions, _ = run_all(engine, [beams(0, [1] * 5, 4, max_tokens=12, ignore_eos=True)])
    assert_found(completions[0])


def test_model_length_cuts_a_search(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=100, max_model_len=12)
    completions, _ = run_all(engine, [beams(0, [1] * 5, 3, max_tokens=50, ignore_eos=True)])
    assert_found(completions[0], max_model_len=12)
    assert {len(output.token_ids) for output in completions[0].outputs} == {7}


def test_more_beams_than_tokens_in_the_vocabulary(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=200)
    completions, _ = run_all(engine, [beams(0, [1] * 5, 20, max_tokens=6)])
    assert_found(completions[0])
    assert len(completions[0].outputs) == 20


def test_stop_tokens_of_the_user_end_beams(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=100)
    request = beams(0, [3, 4], 4, max_tokens=20, stop_token_ids=[2, 5, 8])
    completions, _ = run_all(engine, [request])
    outputs = completions[0].outputs
    assert [output.token_ids.tolist() for output in outputs] == [
        token_ids for token_ids, _ in expected_beams(request)
    ]
    reasons = {output.stop_reason for output in outputs}
    assert reasons
    assert reasons <= {None, 2, 5, 8}
    for output in outputs:
        last = int(output.token_ids[-1])
        assert output.stop_reason == (None if last == EOS else last)


class StopsAtThrees:
    """Stops a beam when the sum of its tokens is a multiple of 3."""

    def __init__(self) -> None:
        self.total = 0

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        self.total += token_id
        return StopMatch("3", 0) if self.total % 3 == 0 else None

    def fork(self) -> StopsAtThrees:
        return copy(self)


@pytest.mark.parametrize("num_blocks", [100, 24])
def test_stop_strings_end_beams(make_engine: MakeEngine, num_blocks: int) -> None:
    """Each beam needs more candidates than without stop strings, because many of them end."""
    requests = [
        replace(
            beams(row, [row, 4], 2, max_tokens=2 + row % 3, length_penalty=4.0),
            make_stop_checker=StopsAtThrees,
        )
        for row in range(1, 61)
    ]
    engine, _ = make_engine(num_blocks=num_blocks)
    engine.scheduler.output_lengths.observe(np.full(500, 2), np.ones(500, dtype=np.bool_))
    completions, _ = run_all(engine, requests)
    outputs = [output for completion in completions.values() for output in completion.outputs]
    for completion in completions.values():
        assert_found(completion)
    assert {output.stop_reason for output in outputs} >= {"3", None}


@pytest.mark.parametrize("logprobs", [None, 6])
def test_requested_log_probabilities_do_not_change_the_beams(logprobs: int | None) -> None:
    """A search for two beams considers four candidates, of which only the second continues."""
    request = replace(
        beams(0, [3, 4], 2, max_tokens=20, logprobs=logprobs), make_stop_checker=StopsAtThrees
    )
    entries = None if logprobs is None else list[TokenLogprobs]()
    beam = SimpleNamespace(
        output_ids=[], cumulative_logprob=0.0, logprobs=entries, stop_checker=StopsAtThrees()
    )
    token_ids = np.array([[3, 1, 6, 9, 2, 4][: request.num_candidates]], np.int32)
    search = BeamSearch(request)
    scores = -np.arange(token_ids.size, dtype=np.float32)[None]
    running = search.advance([beam], token_ids, scores, at_limit=False)
    assert [continuation.token_id for continuation in running] == [1]
    assert [output.token_ids.tolist() for output in search.finished] == [[3]]


@pytest.mark.parametrize("position", [0, 3])
def test_search_with_nan_logits_gets_an_error_and_others_do_not(
    make_engine: MakeEngine, position: int
) -> None:
    engine, runner = make_engine(num_blocks=100)
    inner = runner.run

    def broken(step: Step) -> StepResult:
        result = inner(step)
        nan = (step.sampling.stream == 1) & (step.sampling.position == position)
        return replace(result, nonfinite=nan)

    runner.run = broken  # type: ignore[method-assign]
    requests = [beams(row, [1, 2, 3, 4, 5, row], 3, max_tokens=9) for row in range(3)]
    completions, _ = run_all(engine, requests)
    assert completions[1].error_code == "nan_logits"
    assert completions[1].outputs == []
    for row in (0, 2):
        assert_found(completions[row])
