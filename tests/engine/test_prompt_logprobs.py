"""Every prompt token is scored once, with the whole text before it as context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.request import Completion, Request
from batchinfer.engine.runner import OutOfMemory, Pending
from batchinfer.engine.step import Step
from tests.engine.fake import (
    SPOILED,
    FakeRunner,
    MakeEngine,
    expected,
    likelihood,
    make_request,
    run_all,
)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Draw rows that share prefixes; some ask for scores from a random token on."""
    prefixes = draw(st.lists(st.lists(st.integers(1, 30), max_size=20), min_size=1, max_size=3))
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(prefixes),
                st.lists(st.integers(1, 3), min_size=1, max_size=12),
                st.integers(1, 8),
                st.sampled_from([1, 1, 3]),
                st.sampled_from([None, 0, 2]),
                st.floats(0, 1),
            ),
            min_size=1,
            max_size=16,
        )
    )
    requests = []
    for row_id, (prefix, own, max_tokens, n, wanted, asked_from) in enumerate(rows):
        prompt = prefix + own
        request = make_request(row_id, prompt, max_tokens=max_tokens, n=n, prompt_logprobs=wanted)
        first = 1 + round(asked_from * (len(prompt) - 1))
        requests.append(replace(request, scored_from=first))
    return requests


def assert_scored(completion: Completion) -> None:
    """Assert that each token from ``scored_from`` on is scored with its whole context."""
    request, found = completion.request, completion.prompt_logprobs
    if request.params.prompt_logprobs is None:
        assert found is None
        return
    tokens = request.prompt_token_ids
    places = range(request.scored_from, len(tokens))
    values = [likelihood(tokens[:at].tobytes(), int(tokens[at])) for at in places]
    assert found.logprobs.tolist() == np.array(values, dtype=np.float32).tolist()
    assert found.ranks.tolist() == [int(tokens[at]) + 1 for at in places]
    assert found.top_token_ids.shape == (len(places), request.params.prompt_logprobs)
    assert found.top_logprobs.shape == found.top_token_ids.shape


def scored(runner: FakeRunner) -> list[int]:
    """Return the tokens that steps scored, in order."""
    asked = [step.scored.token_ids for step in runner.steps if step.scored is not None]
    return [int(token) for token in np.concatenate(asked)]


@given(
    requests=workloads(),
    block_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([48, 96, 1024]),
    max_tokens=st.sampled_from([3, 7, 64]),
    max_num_seqs=st.sampled_from([1, 5, 64]),
    caching=st.booleans(),
    host_blocks=st.sampled_from([0, 8]),
)
def test_every_token_is_scored_by_its_whole_context(
    make_engine: MakeEngine,
    requests: list[Request],
    block_size: int,
    pool_tokens: int,
    max_tokens: int,
    max_num_seqs: int,
    caching: bool,
    host_blocks: int,
) -> None:
    engine, _ = make_engine(
        max(pool_tokens // block_size, 4),
        block_size,
        max_num_seqs=max_num_seqs,
        max_tokens=max_tokens,
        caching=caching,
        host_blocks=host_blocks,
        preemption="auto",
    )
    completions, _ = run_all(engine, requests)
    for request in requests:
        completion = completions[request.row_id]
        if completion.error_code is not None:
            assert completion.error_code == "does_not_fit"
            continue
        assert_scored(completion)
        for output in completion.outputs:
            assert output.token_ids.tolist() == expected(request, output.index)


def test_tokens_before_the_scored_tokens_are_shared(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(64, 4)
    context = list(range(1, 15))
    requests = [
        replace(make_request(row, [*context, 20 + row, 30], prompt_logprobs=0), scored_from=14)
        for row in range(3)
    ]
    completions, _ = run_all(engine, requests)
    for completion in completions.values():
        assert_scored(completion)
    cached = [completions[row].stats.cached_tokens for row in range(3)]
    assert cached == [0, 13, 13], "the hit ends before the token whose logits are needed"
    assert scored(runner) == [20, 30, 21, 30, 22, 30], "no token is scored twice"


def test_wholly_scored_prompt_shares_blocks_only_with_later_rows(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(64, 4)
    prompt = list(range(1, 13))
    whole = make_request(0, prompt, prompt_logprobs=1)
    again = replace(whole, row_id=1, rng_key=(0, 1))
    plain = make_request(2, prompt)
    completions, _ = run_all(engine, [whole, again, plain])
    assert [completions[row].stats.cached_tokens for row in range(3)] == [0, 0, 11]
    assert_scored(completions[0])
    assert_scored(completions[1])


def test_preempted_row_scores_only_missing_tokens(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(16, 4, max_tokens=8)
    engine.add_request(make_request(0, list(range(1, 31)), max_tokens=2, prompt_logprobs=0))
    done: list[Completion] = []
    for number in range(20):
        done += engine.step().completions
        if number == 1:
            (sequence,) = engine.scheduler.table.running()
            engine.scheduler.preempt(sequence)
        if done:
            break
    assert_scored(done[0])
    # A preempted row does not yet know the scores of a step in flight, and scores its tokens again.
    assert sorted(set(scored(runner))) == list(range(2, 31))
    assert len(scored(runner)) <= 29 + 8


class _Fails(FakeRunner):
    """A runner that runs out of memory in its third step."""

    def submit(self, step: Step) -> Pending:  # type: ignore[override]
        if len(self.steps) == 2 and not hasattr(self, "failed"):
            self.failed = True
            raise OutOfMemory("as forced to")
        return super().submit(step)


def test_tokens_of_a_failed_step_are_scored_again(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(16, 4, max_tokens=8)
    runner.__class__ = _Fails
    request = make_request(0, list(range(1, 31)), prompt_logprobs=0)
    completions, _ = run_all(engine, [request])
    assert_scored(completions[0])
    assert runner.failed


@pytest.mark.parametrize("others", [{}, {"beam_width": 2, "n": 2}], ids=["", "beams"])
@pytest.mark.parametrize("place", [3, 17, 29])
def test_prompt_with_nan_scores_gets_an_error_and_others_do_not(
    make_engine: MakeEngine, place: int, others: dict[str, int]
) -> None:
    engine, _ = make_engine(64, 4, max_tokens=8)
    tokens = list(range(1, 31))
    bad = [*tokens[:place], SPOILED, *tokens[place + 1 :]]
    requests = [
        make_request(row, prompt, prompt_logprobs=0, **others)
        for row, prompt in enumerate([bad, tokens])
    ]
    completions, _ = run_all(engine, requests)
    assert completions[0].error_code == "nan_logits"
    assert completions[0].prompt_logprobs is None
    assert_scored(completions[1])
    assert completions[1].error_code is None


def test_given_token_is_not_drawn(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(64, 4)
    forced = replace(make_request(0, [1, 2, 3], max_tokens=1, logprobs=None), given_token=77)
    free = make_request(1, [1, 2, 3], max_tokens=1)
    completions, _ = run_all(engine, [forced, free])
    assert completions[0].outputs[0].token_ids.tolist() == [77]
    assert completions[1].outputs[0].token_ids.tolist() == expected(free, 0)
    run_all(engine, [replace(free, row_id=2)])
    assert runner.steps[-1].sampling.given_token_ids is None
