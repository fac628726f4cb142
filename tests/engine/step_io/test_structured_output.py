"""Samples with a grammar: masks, forced tokens and ends, in all states of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.request import Completion, Request
from batchinfer.protocols import StopMatch
from tests.engine import fake
from tests.engine.fake import EOS, MakeEngine, expected, hashed, make_request, run_all
from tests.engine.toy_grammar import Toy, constrained, expected_of


def rows(count: int, **params: Any) -> tuple[list[Request], dict[int, Toy]]:
    """Return rows, every third without a grammar, and the grammars of the others."""
    requests, grammars = [], {}
    for row_id in range(count):
        request = make_request(row_id, [1 + row_id % 4] * (3 + row_id % 5), max_tokens=24, **params)
        if row_id % 3:
            grammars[row_id] = Toy(longest=8 + row_id % 17, salt=row_id % 5)
            request = constrained(request, grammars[row_id])
        requests.append(request)
    return requests, grammars


def check(completions: dict[int, Completion], grammars: dict[int, Toy]) -> None:
    """Check that every sample has its expected tokens."""
    for row_id, completion in completions.items():
        assert completion.error_code is None
        request = completion.request
        for sample in completion.outputs:
            if row_id in grammars:
                wanted = expected_of(request, sample.index, grammars[row_id])
            else:
                wanted = expected(request, sample.index)
            assert sample.token_ids.tolist() == wanted
            assert sample.finish_reason == ("stop" if wanted[-1] == EOS else "length")
            assert completion.stats.output_tokens >= len(wanted)


@pytest.mark.parametrize(
    "setup",
    [
        {"num_blocks": 400},
        {"num_blocks": 24},
        {"num_blocks": 24, "host_blocks": 60, "preemption": "swap"},
        {"num_blocks": 24, "caching": False},
        {"num_blocks": 400, "max_tokens": 5},
        {"num_blocks": 400, "max_num_seqs": 3},
        {"num_blocks": 400, "windows": (0, 6)},
    ],
    ids=lambda setup: "-".join(f"{key}_{value}" for key, value in setup.items()),
)
@pytest.mark.parametrize("n", [1, 3])
def test_samples_follow_their_grammars(
    make_engine: MakeEngine, setup: dict[str, Any], n: int
) -> None:
    requests, grammars = rows(16, n=n)
    engine, _ = make_engine(block_size=4, **setup)
    completions, steps = run_all(engine, requests)
    assert len(completions) == 16
    check(completions, grammars)
    if setup["num_blocks"] == 24:
        assert sum(step.num_preempted for step in steps) > 0


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(0, 30), st.integers(0, 6)),
        min_size=1,
        max_size=12,
    ),
    st.integers(20, 60),
    st.booleans(),
)
def test_any_rows_in_any_pool(
    asked: list[tuple[int, int, int, int]], num_blocks: int, runs_ahead: bool
) -> None:
    requests, grammars = [], {}
    for row_id, (n, max_tokens, min_tokens, salt) in enumerate(asked):
        request = make_request(
            row_id,
            [7, 8, 9, salt + 1],
            n=n,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
        )
        if salt:
            grammars[row_id] = Toy(longest=5 * salt, salt=salt)
            request = constrained(request, grammars[row_id])
        requests.append(request)
    engine, _ = fake.make_engine(num_blocks, 4, runs_ahead=runs_ahead, host_blocks=8)
    completions, _ = run_all(engine, requests)
    for row_id, completion in completions.items():
        for sample in completion.outputs:
            if row_id in grammars:
                wanted = expected_of(completion.request, sample.index, grammars[row_id])
                assert sample.token_ids.tolist() == wanted


def test_forced_tokens_take_no_extra_steps(make_engine: MakeEngine) -> None:
    class Rails(Toy):
        def allowed(self, tokens: Any) -> list[int]:
            return [EOS] if len(tokens) == 20 else [5, 6] if len(tokens) % 5 == 0 else [7]

    engine, runner = make_engine(100, 4)
    (completion,) = run_all(engine, [constrained(make_request(0, [1, 2], max_tokens=50), Rails())])[
        0
    ].values()
    (sample,) = completion.outputs
    assert len(sample.token_ids) == 21
    assert sample.token_ids[-1] == EOS
    assert sum(step.num_samples for step in runner.steps) == 4  # the other tokens are forced
    assert sample.cumulative_logprob == -4.0
    assert completion.stats.output_tokens == 21


def test_rows_without_a_grammar_are_not_delayed() -> None:
    free = [make_request(row_id, [1, 2], max_tokens=30, min_tokens=30) for row_id in range(9)]
    requests = [*free, constrained(make_request(9, [1, 2], max_tokens=30), Toy(longest=29))]
    engine, runner = fake.make_engine(200, 4, runs_ahead=True)
    run_all(engine, requests)
    ahead = [step for step in runner.steps if (step.previous_sample >= 0).any()]
    assert len(ahead) >= 28
    assert all(len(step.sampling.masked_rows) <= 1 for step in runner.steps)


def test_a_failing_grammar_fails_only_its_row(make_engine: MakeEngine) -> None:
    good, bad = Toy(salt=1), Toy(salt=1, breaks_at=4)
    requests = [
        constrained(make_request(0, [1, 2, 3, 4, 5], max_tokens=24), good),
        constrained(make_request(1, [1, 2, 3, 4, 5], max_tokens=24, n=2), bad),
        make_request(2, [1, 2, 3, 4, 5], max_tokens=24),
    ]
    engine, _ = make_engine(100, 4)
    completions, _ = run_all(engine, requests)
    assert completions[1].error_code == "invalid_structured_output"
    assert completions[1].error_message == "too much work"
    assert completions[1].stats.cached_tokens > 0
    assert completions[1].stats.recomputed_tokens == 0, "blocks are not the cause"
    check({0: completions[0], 2: completions[2]}, {0: good})


def test_a_complete_text_ends_before_min_tokens(make_engine: MakeEngine) -> None:
    grammar = Toy(longest=5)
    request = constrained(make_request(0, [1, 2], max_tokens=30, min_tokens=20), grammar)
    (completion,) = run_all(make_engine(100, 4)[0], [request])[0].values()
    (sample,) = completion.outputs
    assert len(sample.token_ids) == 6
    assert sample.finish_reason == "stop"


class _Stops:
    """Ends a sample at its third token."""

    def __init__(self) -> None:
        self.seen = 0

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        self.seen += 1
        return StopMatch("x", 2) if may_stop and self.seen >= 3 else None


def test_stop_strings_see_forced_tokens(make_engine: MakeEngine) -> None:
    for salt in range(6):
        grammar = Toy(salt=salt)
        request = constrained(make_request(0, [1, 2], max_tokens=30), grammar)
        stopping = replace(request, make_stop_checker=_Stops)
        (completion,) = run_all(make_engine(100, 4)[0], [stopping])[0].values()
        (sample,) = completion.outputs
        assert sample.token_ids.tolist() == expected_of(request, 0, grammar)[:3]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", "x")


def test_forced_tokens_have_logprobs() -> None:
    grammar = Toy(longest=12, salt=2)
    request = constrained(make_request(0, [1, 2], max_tokens=30, logprobs=1), grammar)

    class Ranks(fake.FakeRunner):
        def run(self, step: fake.Step) -> fake.StepResult:
            result = super().run(step)
            return replace(result, ranks=np.full(len(result.token_ids), 3, dtype=np.int32))

    engine, _ = fake.make_engine(100, 4)
    engine._runner = Ranks(100, 4, hashed)
    (completion,) = run_all(engine, [request])[0].values()
    (sample,) = completion.outputs
    assert sample.logprobs is not None
    assert [entry.token_id for entry in sample.logprobs] == sample.token_ids.tolist()
    forced = [entry for entry in sample.logprobs if entry.rank == 1]
    assert forced
    assert all(entry.logprob == 0.0 and entry.top == ((entry.token_id, 0.0),) for entry in forced)
