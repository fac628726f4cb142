"""Requests that stop at any step and resume from their output give the same results."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.engine import Engine
from batchinfer.engine.output_tracker import OutputIncrement, OutputTracker
from batchinfer.engine.request import (
    Completion,
    PartialOutput,
    PartialSample,
    Request,
    RequestStats,
    TokenLogprobs,
)
from batchinfer.engine.stats import StepStats
from batchinfer.job.tokens.token_tables import KeptOutput
from batchinfer.protocols import StopMatch
from tests.engine.fake import SPOILED, hashed, make_engine, make_request
from tests.engine.invariants import check_scheduler
from tests.engine.searches import beams
from tests.engine.toy_grammar import Toy, constrained


class Sums:
    """Stops a sample when the sum of its tokens is a multiple of 31."""

    def __init__(self) -> None:
        self.total = 0

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        self.total += token_id
        return StopMatch("31", self.total) if may_stop and self.total % 31 == 0 else None

    def fork(self) -> Sums:
        return copy(self)


def ends_seldom(context: bytes, stream: int, sample: int, position: int) -> int:
    token = hashed(context, stream, sample, position)
    return 0 if token % 29 == 0 else token


def workload() -> list[Request]:
    """Return rows of each kind; some share a prefix."""
    return [
        make_request(0, [5] * 9 + [1], max_tokens=30),
        make_request(1, [5] * 9 + [2], max_tokens=30, n=3),
        beams(2, [5] * 9 + [3], 3, n=2, max_tokens=14),
        make_request(3, [7, 8], max_tokens=25, presence_penalty=0.5, min_tokens=9),
        constrained(make_request(4, [9, 9, 9], max_tokens=24), Toy(longest=20)),
        replace(make_request(5, [1, 2, 3], max_tokens=40), make_stop_checker=Sums),
        make_request(6, [5] * 9 + [6], max_tokens=20, prompt_logprobs=1, n=2),
        make_request(7, [5, 5], max_tokens=1),
        replace(make_request(8, [5] * 9 + [1], max_tokens=9, n=2), first_sample=3),
        make_request(9, [4] * 30, max_tokens=12, logprobs=2),
        replace(
            beams(10, [5] * 9 + [4], 3, max_tokens=14, logprobs=2, min_tokens=4),
            make_stop_checker=Sums,
        ),
    ]


class Outputs:
    """Partial outputs of rows, assembled from increments."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptOutput] = {}

    def add(self, run: str, increments: list[OutputIncrement]) -> None:
        for one in increments:
            known = self._kept.get(one.row_id)
            if known is None or known.chain != (run, one.chain):
                known = self._kept[one.row_id] = KeptOutput(one.key, (run, one.chain), one.stats)
            before = known.num_tokens
            known.add(one)
            added = sum(len(sample.token_ids) for _, sample in one.samples)
            assert known.num_tokens == before + added, (
                "an increment is missing or was reported twice"
            )

    def of(self, request: Request) -> Request:
        """Return the request with the partial output that is known so far."""
        kept = self._kept.get(request.row_id)
        return request if kept is None else replace(request, partial_output=kept.partial())


def steps(engine: Engine) -> Iterator[tuple[list[Completion], StepStats | None]]:
    """Run all added rows to their ends; check invariants after each step."""
    for _ in range(5000):
        if not engine.num_unfinished:
            return
        outcome = engine.step()
        check_scheduler(engine.scheduler)
        yield outcome.completions, outcome.stats
    raise AssertionError("a row never ended")


def facts(completion: Completion) -> object:
    """Return all parts of a completion that an interruption must not change."""
    outputs = [
        (
            *(one.index, one.token_ids.tolist(), one.finish_reason, one.stop_reason),
            *(one.stop_match, one.cumulative_logprob, one.logprobs, one.score),
        )
        for one in completion.outputs
    ]
    return outputs, completion.error_code, completion.prompt_token_logprobs()


def unbroken(requests: list[Request], **options: Any) -> dict[int, object]:
    engine, _ = make_engine(64, next_token=ends_seldom, **options)
    for request in requests:
        engine.add_request(request)
    return {
        completion.request.row_id: facts(completion)
        for completions, _ in steps(engine)
        for completion in completions
    }


@settings(max_examples=12)
@given(
    cuts=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    every=st.integers(1, 7),
    ahead=st.booleans(),
    num_blocks=st.sampled_from([24, 64]),
)
def test_interrupted_rows_continue_without_a_difference(
    cuts: list[int], every: int, ahead: bool, num_blocks: int
) -> None:
    """Stop at random steps, several times; report output every few steps.

    Also check that the statistics add up to the tokens that were computed.
    """
    rows = {request.row_id: request for request in workload()}
    wanted = unbroken(workload(), runs_ahead=ahead)
    outputs, found = Outputs(), dict[int, object]()
    prefill = computed_once = recomputed = 0
    for run, cut in enumerate([*cuts, 5000]):
        engine, _ = make_engine(num_blocks, next_token=ends_seldom, runs_ahead=ahead)
        tracker = OutputTracker()
        for row_id, request in rows.items():
            if row_id not in found:
                engine.add_request(outputs.of(request))
        untold = list[StepStats]()
        for number, (completions, stats) in enumerate(steps(engine), start=1):
            untold += [] if stats is None else [stats]
            for completion in completions:
                found[completion.request.row_id] = facts(completion)
                kept = completion.stats
                computed_once += kept.prompt_tokens - kept.cached_tokens
                recomputed += kept.recomputed_tokens
            # Reported output is written to disk together with the rows that have finished.
            if number % every == 0 or completions or number == cut:
                whole = number % 5 == 0
                outputs.add(f"{run}", tracker.take(engine.states, [], report_all=whole))
                prefill += sum(one.prefill_tokens for one in untold)
                untold.clear()
            if number == cut:
                break
        prefill += sum(one.prefill_tokens for one in untold)
    assert found == wanted
    lost = prefill - computed_once - recomputed
    # Each stop loses at most the prompts of rows that have not drawn a token yet.
    assert 0 <= lost <= sum(r.num_prompt_tokens for r in rows.values()) * len(cuts)


def test_a_token_is_recomputed_but_not_drawn_again() -> None:
    request = make_request(0, [1, 2, 3], max_tokens=10)
    engine, runner = make_engine(16)
    engine.add_request(request)
    outputs, tracker = Outputs(), OutputTracker()
    for _, _ in zip(range(4), steps(engine), strict=False):
        pass
    outputs.add("run", tracker.take(engine.states, []))
    engine, runner = make_engine(16)
    engine.add_request(outputs.of(request))
    ended, stats = zip(*steps(engine), strict=True)
    (completion,) = ended[-1]
    assert [len(step.token_ids) for step in runner.steps] == [3 + 4] + [1] * 5
    assert (completion.stats.recomputed_tokens, completion.stats.prompt_tokens) == (3 + 3, 3)
    assert sum(step.prefill_tokens for step in stats if step) == 3 + 3
    assert sum(step.decode_tokens for step in stats if step) == 6


def complete_partial() -> PartialOutput:
    ids = np.array([3, 4], dtype=np.int32)
    top = ((3, 0.0),)
    logprobs = [TokenLogprobs(token, -1.0, 1, top) for token in (3, 4)]
    samples = [PartialSample(index, ids, -2.0, logprobs) for index in range(2)]
    return PartialOutput(tuple(samples), (), make_stats())


def make_stats() -> RequestStats:
    return RequestStats(prompt_tokens=2)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda partial: replace(partial, samples=partial.samples[:1]),
        lambda partial: replace(partial, samples=(partial.samples[0],) * 2),
        lambda partial: replace(
            partial, samples=(partial.samples[0], replace(partial.samples[1], logprobs=None))
        ),
        lambda partial: replace(
            partial,
            samples=(
                partial.samples[0],
                replace(partial.samples[1], token_ids=np.arange(20, dtype=np.int32)),
            ),
        ),
        lambda partial: replace(
            partial,
            samples=(
                partial.samples[0],
                replace(partial.samples[1], token_ids=np.arange(0, dtype=np.int32)),
            ),
        ),
    ],
    ids=["a sample lacks", "twice", "no logprobs", "past its end", "no tokens"],
)
def test_an_incomplete_partial_output_is_computed_again(spoil: Any) -> None:
    request = make_request(0, [1, 2], max_tokens=12, n=2, logprobs=1)
    partial = complete_partial()
    for one, resumes in ((partial, True), (spoil(partial), False)):
        engine, runner = make_engine(16)
        engine.add_request(replace(request, partial_output=one))
        engine.step()
        assert (len(runner.steps[0].token_ids) > 2) == resumes


def test_tokens_that_a_grammar_or_stop_checker_refuses_are_drawn_again() -> None:
    ids = np.array([3, 28], dtype=np.int32)
    partial = PartialOutput((PartialSample(0, ids, -2.0, None),), (), make_stats())
    request = make_request(0, [1, 2], max_tokens=12)
    for spoiled in (
        replace(request, make_stop_checker=Sums),
        constrained(request, Toy(breaks_at=2)),
    ):
        engine, runner = make_engine(16)
        engine.add_request(replace(spoiled, partial_output=partial))
        engine.step()
        assert len(runner.steps[0].token_ids) == 2


def test_samples_that_are_all_finished_need_no_step() -> None:
    request = make_request(0, [1, 2], max_tokens=3, n=2)
    engine, _ = make_engine(16)
    engine.add_request(request)
    (completion,) = [one for completions, _ in steps(engine) for one in completions]
    tracker, outputs = OutputTracker(), Outputs()
    outputs.add("run", tracker.take([], [completion]))
    engine, runner = make_engine(16)
    engine.add_request(outputs.of(request))
    (again,) = engine.step().completions
    assert facts(again) == facts(completion)
    assert again.stats.output_tokens == 6
    assert not runner.steps
    assert not tracker.take([], [completion]), "partial already"


def test_a_run_reports_given_tokens_with_its_first_new_token() -> None:
    """Otherwise, runs that die before they draw a token would seem to make progress."""
    request = make_request(0, [1, 2, 3, 4, 5], max_tokens=8)
    ids = np.array([3, 4], dtype=np.int32)
    partial = PartialOutput((PartialSample(0, ids, -2.0, None),), (), make_stats())
    engine, _ = make_engine(16, max_tokens=4)
    engine.add_request(replace(request, partial_output=partial))
    tracker = OutputTracker()
    engine.step()
    assert not tracker.take(engine.states, []), "known tokens are being computed again"
    engine.step()
    (partial,) = tracker.take(engine.states, [])
    assert [(start, len(sample.token_ids)) for start, sample in partial.samples] == [(0, 3)]
    engine.step()
    (then,) = tracker.take(engine.states, [])
    assert then.chain == partial.chain
    assert [(start, len(sample.token_ids)) for start, sample in then.samples] == [(3, 1)]


def test_a_row_that_starts_over_is_reported_again() -> None:
    """A row starts over if its logits are NaN, perhaps because of blocks from another row."""
    engine, _ = make_engine(64)
    engine.add_request(make_request(0, [1, 2, 3, 4, 5], max_tokens=8, n=2))
    tracker = OutputTracker()
    for _, _ in zip(range(3), steps(engine), strict=False):
        pass
    (partial,) = tracker.take(engine.states, [])
    (state,) = engine.states
    state.skip_prefix_cache = True  # as if the row had failed, perhaps because of another row
    for sample in state.samples:
        engine.scheduler.drop(sample)
    engine.scheduler.requeue(state.restart())
    (void,) = tracker.take(engine.states, [])
    assert void.chain > partial.chain
    assert void.samples == []
    engine.step()
    (restarted,) = tracker.take(engine.states, [])
    assert restarted.chain == void.chain
    assert [start for start, _ in restarted.samples] == [0, 0]


def test_a_prompt_with_nan_logits_fails_after_a_resume() -> None:
    request = make_request(0, [1, SPOILED, 2], max_tokens=5, prompt_logprobs=0)
    ids = np.array([3, 4], dtype=np.int32)
    partial = PartialOutput((PartialSample(0, ids, -2.0, None),), (), make_stats())
    engine, _ = make_engine(16)
    engine.add_request(replace(request, partial_output=partial))
    (completion,) = [one for completions, _ in steps(engine) for one in completions]
    assert completion.error_code == "nan_logits"
