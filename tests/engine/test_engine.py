"""Each sample has the same tokens as when it runs alone, however its steps are scheduled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.request import Request
from batchinfer.engine.step import Step, StepResult
from batchinfer.protocols import StopMatch
from tests.engine.fake import EOS, FakeRunner, MakeEngine, expected, make_request, run_all
from tests.engine.workloads import assert_expected, often_ends, run_preempting, workloads

KV_SETTINGS = st.one_of(
    st.fixed_dictionaries(
        {"windows": st.sampled_from([(0,), (0, 3), (0, 0, 9), (0, 2, 9, 9), (9,), (2, 5)])}
    ),
    st.fixed_dictionaries(
        {
            "slots_per_state": st.sampled_from([1, 3]),
            "windows": st.sampled_from([(), (0,), (0, 3), (0, 2, 9), (2, 5)]),
        }
    ),
    st.fixed_dictionaries(
        {
            "slots_per_state": st.sampled_from([1, 3]),
            "windows": st.sampled_from([(), (0,)]),
            "host_blocks": st.sampled_from([2, 4, 16, 500]),
            "preemption": st.sampled_from(["swap", "auto"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "host_blocks": st.sampled_from([1, 2, 4, 16, 500]),
            "preemption": st.sampled_from(["swap", "auto"]),
        }
    ),
)
"""Engine options for windows, recurrent states, and copies of blocks and states to the host."""


@settings(max_examples=60)
@given(
    requests=workloads(),
    block_size=st.sampled_from([1, 2, 4, 16]),
    pool_tokens=st.sampled_from([32, 64, 128, 1024]),
    limits=st.fixed_dictionaries(
        {
            "max_tokens": st.sampled_from([5, 7, 64]),
            "max_num_seqs": st.sampled_from([2, 5, 64]),
            "caching": st.booleans(),
        }
    ),
    kv=KV_SETTINGS,
    every=st.sampled_from([2, 5, 1000]),
)
def test_outputs_do_not_depend_on_how_they_were_scheduled(
    make_engine: MakeEngine,
    requests: list[Request],
    block_size: int,
    pool_tokens: int,
    limits: dict[str, Any],
    kv: dict[str, Any],
    every: int,
) -> None:
    windows = kv.get("windows", (0,))
    sees_all = 0 in windows or "slots_per_state" in kv  # a state depends on all tokens
    engine, _ = make_engine(
        pool_tokens // block_size * max(len(windows), 1),
        block_size,
        next_token=often_ends,
        **limits,
        **kv,
    )
    if engine._steps_ahead:
        completions, steps = run_all(engine, requests)
    else:
        completions, steps = run_preempting(engine, requests, every)
    assert len(completions) == len(requests)
    assert {c.error_code for c in completions.values()} <= {None, "does_not_fit"}
    ran = [c for c in completions.values() if c.error_code is None]
    for completion in ran:
        assert_expected(completion, often_ends, 0 if sees_all else max(windows))
    assert engine.scheduler.pool.num_used == 0

    computed = sum(c.stats.prompt_tokens - c.stats.cached_tokens for c in ran)
    recomputed = sum(c.stats.recomputed_tokens for c in ran)
    assert sum(step.prefill_tokens for step in steps) == computed + recomputed
    assert sum(step.recomputed_tokens for step in steps) == recomputed
    assert sum(step.cached_tokens for step in steps) == sum(c.stats.cached_tokens for c in ran)
    if engine._steps_ahead:
        assert sum(step.num_preempted for step in steps) == sum(c.stats.preemptions for c in ran)
    swapped = sum(c.stats.swapped_blocks for c in ran)
    assert sum(step.swapped_in_blocks for step in steps) == swapped
    for step in steps:
        assert 0 <= step.kv_tokens_live <= step.kv_blocks_used * block_size
        if not any(windows):  # a row keeps the slots before its windows until its group forks
            assert step.kv_blocks_used <= step.kv_logical_blocks
        assert step.kv_waste < 1


def test_rows_share_prefixes_only_with_rows_of_their_adapter(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(64, 4)
    prompt = list(range(1, 14))
    requests = [
        replace(make_request(row, prompt, max_tokens=3), adapter=adapter)
        for row, adapter in enumerate((0, 1, 2, 1, 0))
    ]
    completions, _ = run_all(engine, requests)
    cached = {row: done.stats.cached_tokens for row, done in completions.items()}
    assert cached == {0: 0, 1: 0, 2: 0, 3: 12, 4: 12}
    for step in runner.steps:
        assert step.adapters is not None
        assert len(step.adapters) == step.num_sequences
    run_all(engine, [make_request(9, prompt, max_tokens=3)])
    assert runner.steps[-1].adapters is None, "the base model runs alone"


def test_sample_i_of_n_is_sample_i_of_fewer(make_engine: MakeEngine) -> None:
    def outputs(n: int) -> list[list[int]]:
        engine, _ = make_engine(num_blocks=100)
        completions, _ = run_all(engine, [make_request(7, [1, 2, 3, 4, 5], max_tokens=9, n=n)])
        return [output.token_ids.tolist() for output in completions[7].outputs]

    eight = outputs(8)
    assert len({tuple(tokens) for tokens in eight}) == 8
    for n in range(1, 8):
        assert outputs(n) == eight[:n]


@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_prompt_and_copy_only_its_last_block(
    make_engine: MakeEngine, caching: bool
) -> None:
    engine, _ = make_engine(num_blocks=100, block_size=4, caching=caching)
    request = make_request(0, list(range(1, 11)), max_tokens=3, n=4, ignore_eos=True)
    completions, steps = run_all(engine, [request])
    # 10 prompt tokens are 2 full blocks and half a block; 2 output tokens fill it in each sample.
    assert [step.kv_blocks_used for step in steps] == [3, 2 + 4, 2 + 4]
    assert [step.kv_logical_blocks for step in steps] == [3, 12, 12]
    assert [step.kv_blocks_shared for step in steps] == [0, 2, 2]
    assert sum(step.cow_copies for step in steps) == 3
    assert sum(step.prefill_tokens for step in steps) == 10
    assert completions[0].stats.peak_blocks == 6


def test_statistics_compare_blocks_with_reserved_slots(make_engine: MakeEngine) -> None:
    """Reserving 2,048 slots for 600 tokens wastes 70.7 %; blocks of 16 waste 1.3 %."""
    request = make_request(0, [1] * 500, max_tokens=1548)
    ends_at_600 = make_engine(
        num_blocks=200,
        block_size=16,
        max_tokens=2048,
        next_token=lambda context, stream, sample, position: EOS if position == 100 else 7,
    )
    _, steps = run_all(ends_at_600[0], [request])
    last = steps[-1]
    assert last.kv_tokens_live == 600
    assert 1 - last.kv_tokens_logical / (last.contiguous_blocks * 16) == pytest.approx(
        0.707, abs=1e-3
    )
    assert last.kv_waste == pytest.approx(0.013, abs=1e-3)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        ([], 4, "empty_prompt"),
        ([1] * 64, 4, "prompt_too_long"),
        ([1] * 63, 1, None),
        ([1] * 30, 12, "does_not_fit"),
        ([1] * 30, 11, None),
    ],
)
def test_rows_that_can_never_run_get_an_error(
    make_engine: MakeEngine, prompt: list[int], max_tokens: int, code: str | None
) -> None:
    blocks = 10 if len(prompt) == 30 else 16
    engine, _ = make_engine(num_blocks=blocks, block_size=4, max_model_len=64)
    completions, _ = run_all(
        engine, [make_request(0, prompt, max_tokens=max_tokens), make_request(1, [5], max_tokens=2)]
    )
    assert completions[0].error_code == code
    assert completions[1].error_code is None


def test_model_length_cuts_max_tokens(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=100, max_model_len=20)
    completions, _ = run_all(engine, [make_request(0, [1] * 15, max_tokens=50)])
    (output,) = completions[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (5, "length")


def test_stop_tokens_end_a_sample_after_min_tokens(make_engine: MakeEngine) -> None:
    def counts(context: bytes, stream: int, sample: int, position: int) -> int:
        return [9, EOS, 8, 9, EOS][position]

    def run(**params: object) -> tuple[list[int], str, object]:
        engine, _ = make_engine(num_blocks=10, next_token=counts)
        completions, _ = run_all(engine, [make_request(0, [1, 2], max_tokens=5, **params)])
        (output,) = completions[0].outputs
        return output.token_ids.tolist(), output.finish_reason, output.stop_reason

    assert run() == ([9, EOS], "stop", None)
    assert run(ignore_eos=True) == ([9, EOS, 8, 9, EOS], "length", None)
    assert run(stop_token_ids=[EOS], ignore_eos=True) == ([9, EOS], "stop", EOS)
    assert run(stop_token_ids=[8], ignore_eos=True) == ([9, EOS, 8], "stop", 8)
    assert run(stop_token_ids=[9], min_tokens=3) == ([9, EOS, 8, 9], "stop", 9)


def test_stop_tokens_are_banned_until_min_tokens(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(num_blocks=10)
    request = make_request(0, [1, 2], max_tokens=4, min_tokens=2, stop_token_ids=[5])
    run_all(engine, [request])
    bans = [step.sampling.bias_token_ids.tolist() for step in runner.steps]
    assert bans == [[EOS, 5], [EOS, 5], [], []]
    assert runner.steps[0].sampling.bias_values.tolist() == [-np.inf, -np.inf]


def test_bad_words_ban_their_last_token(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(
        num_blocks=10, next_token=lambda context, stream, sample, position: [4, 5, 6][position]
    )
    request = replace(
        make_request(0, [4, 5], max_tokens=3), bad_words_token_ids=((8,), (4, 5, 7), (5, 9))
    )
    run_all(engine, [request])
    bans = [step.sampling.bias_token_ids.tolist() for step in runner.steps]
    assert bans == [[8], [8], [7, 8, 9]]


def test_only_rows_with_penalties_carry_their_tokens(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(num_blocks=10)
    plain = make_request(0, [1, 2], max_tokens=2)
    penalized = make_request(1, [3, 4, 5], max_tokens=2, frequency_penalty=0.5)
    run_all(engine, [plain, penalized])
    penalties = runner.steps[1].sampling.penalties
    assert penalties.samples.tolist() == [1]
    assert penalties.prompt_token_ids.tolist() == [[3, 4, 5]]
    assert penalties.output_token_ids.tolist() == [[expected(penalized, 0)[0]]]


class StopsAfter:
    """A stop checker that finds a stop string after ``count`` tokens."""

    def __init__(self, count: int) -> None:
        self.left = count

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        self.left -= 1
        return StopMatch("END", 3) if self.left == 0 else None


def test_stop_string_ends_only_its_sample(make_engine: MakeEngine) -> None:
    request = replace(
        make_request(0, [1, 2], max_tokens=9, n=2), make_stop_checker=lambda: StopsAfter(4)
    )
    engine, _ = make_engine(num_blocks=10)
    completions, _ = run_all(engine, [request, make_request(1, [3], max_tokens=9)])
    for output in completions[0].outputs:
        assert output.token_ids.tolist() == expected(request, output.index)[:4]
        assert (output.finish_reason, output.stop_reason) == ("stop", "END")
        assert output.stop_match == StopMatch("END", 3)
    assert len(completions[1].outputs[0].token_ids) == 9


class BreaksFor(FakeRunner):
    """A runner that gives one sample of row 1 NaN logits, at position 3."""

    def run(self, step: Step) -> StepResult:
        result = super().run(step)
        batch = step.sampling
        broken = (batch.stream == 1) & (batch.position == 3) & (batch.sample_index == 1)
        return replace(result, nonfinite=broken)


@pytest.mark.parametrize("num_blocks", [8, 100])
def test_row_with_nan_logits_gets_an_error_and_others_do_not(
    make_engine: MakeEngine, num_blocks: int
) -> None:
    engine, runner = make_engine(num_blocks=num_blocks, block_size=4)
    engine._runner = BreaksFor(num_blocks, runner.block_size)
    requests = [make_request(row, [1, 2, 3, 4, row], max_tokens=6, n=3) for row in range(3)]
    completions, _ = run_all(engine, requests)
    assert completions[1].error_code == "nan_logits"
    for row in (0, 2):
        assert completions[row].error_code is None
        for output in completions[row].outputs:
            assert output.token_ids.tolist() == expected(requests[row], output.index)


def test_blocks_of_a_row_with_nan_logits_are_not_used_again(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(num_blocks=50)
    engine._runner = BreaksFor(50, runner.block_size)
    prompt = list(range(1, 20))
    broken, _ = run_all(engine, [make_request(1, prompt, max_tokens=6, n=3)])
    assert broken[1].error_code == "nan_logits"
    again, _ = run_all(engine, [make_request(2, prompt, max_tokens=2)])
    assert again[2].stats.cached_tokens == 0


def test_only_rows_that_ask_get_logprobs(make_engine: MakeEngine) -> None:
    class WithLogprobs(FakeRunner):
        def run(self, step: Step) -> StepResult:
            result = super().run(step)
            count = len(result.token_ids)
            return replace(
                result,
                ranks=np.full(count, 2, dtype=np.int32),
                top_token_ids=np.tile(np.asarray([[3, 4]], dtype=np.int32), (count, 1)),
                top_logprobs=np.tile(np.asarray([[-0.5, -1.5]], dtype=np.float32), (count, 1)),
            )

    engine, runner = make_engine(num_blocks=20)
    engine._runner = WithLogprobs(20, runner.block_size)
    requests = [
        make_request(0, [1], max_tokens=2, logprobs=1),
        make_request(1, [2], max_tokens=2),
        make_request(2, [3], max_tokens=2, logprobs=0),
    ]
    completions, _ = run_all(engine, requests)
    first, none, bare = (completions[row].outputs[0].logprobs for row in range(3))
    assert none is None
    assert first[0].top == ((3, -0.5),)
    assert (first[0].rank, first[0].logprob) == (2, -1.0)
    assert bare[1].top == ()
    assert completions[1].outputs[0].cumulative_logprob == pytest.approx(-2.0)


def test_steps_count_their_output_tokens(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(64, 4)
    for row in range(5):
        engine.add_request(make_request(row, [1, 2, 3], max_tokens=row + 1, n=2))
    reported = made = 0
    while engine.num_unfinished:
        outcome = engine.step()
        reported += outcome.output_tokens
        made += sum(len(one.token_ids) for done in outcome.completions for one in done.outputs)
    assert reported == made == 2 * (1 + 2 + 3 + 4 + 5)
