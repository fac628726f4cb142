"""The engine submits a step before it reads the result of the previous step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchinfer.engine.engine import Engine
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.runner import Ready
from batchinfer.engine.step import Step, StepResult
from tests.engine.fake import (
    EOS,
    FakeRunner,
    MakeEngine,
    NextToken,
    expected,
    hashed,
    make_engine,
    make_request,
    run_all,
)
from tests.engine.invariants import check_scheduler
from tests.engine.searches import assert_found, beams


def ends_at(length: int) -> NextToken:
    """Draw like ``hashed``, but return EOS as the ``length``-th output token."""

    def next_token(context: bytes, stream: int, sample: int, position: int) -> int:
        return EOS if position == length - 1 else hashed(context, stream, sample, position)

    return next_token


@dataclass
class Logged:
    """A pending step that calls ``note`` when its result is read."""

    pending: Ready
    note: Callable[[], None]

    def result(self) -> StepResult:
        self.note()
        return self.pending.result()


class Logs(FakeRunner):
    """Records the order in which steps are submitted and read."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.log: list[str] = []

    def submit(self, step: Step) -> Logged:  # type: ignore[override]
        number = len(self.steps)
        self.log.append(f"submit {number}")
        return Logged(super().submit(step), lambda: self.log.append(f"read {number}"))


@pytest.mark.parametrize(
    ("runs_ahead", "log"),
    [
        (False, "submit 0, read 0, submit 1, read 1, submit 2, read 2"),
        (True, "submit 0, submit 1, read 0, submit 2, read 1, read 2"),
    ],
)
def test_a_step_is_submitted_before_the_previous_one_is_read(runs_ahead: bool, log: str) -> None:
    engine, _ = make_engine(10, runs_ahead=runs_ahead)
    engine._runner = runner = Logs(10, 4)
    run_all(engine, [make_request(0, [1, 2], max_tokens=3)])
    assert ", ".join(runner.log) == log


def test_logits_processors_get_all_tokens_before_the_next_one() -> None:
    engine, runner = make_engine(10, runs_ahead=True)
    hooked = replace(make_request(0, [1, 2], max_tokens=4), logits_processors=(print,))
    run_all(engine, [hooked, make_request(1, [3, 4], max_tokens=4)])
    rows = [row for step in runner.steps for row in step.sampling.processed]
    assert [len(row.output_token_ids) for row in rows] == [0, 1, 2, 3]
    assert {tuple(row.prompt_token_ids) for row in rows} == {(1, 2)}
    longest = rows[-1].output_token_ids
    assert [row.output_token_ids for row in rows] == [longest[:at] for at in range(4)]


def test_an_unknown_token_refers_to_its_sample() -> None:
    engine, runner = make_engine(40, runs_ahead=True)
    submitted: list[Step] = []
    submit = runner.submit

    def note(step: Step) -> Ready:
        submitted.append(step)
        return submit(step)

    runner.submit = note  # type: ignore[method-assign]
    run_all(engine, [make_request(row, [row + 1] * 3, max_tokens=3) for row in range(3)])
    assert [step.previous_sample.tolist() for step in submitted] == [[-1] * 9, [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("length", range(1, 7))
def test_an_end_token_costs_one_extra_token_and_an_end_by_length_none(
    make_engine: MakeEngine, length: int
) -> None:
    engine, runner = make_engine(10, next_token=ends_at(length))
    request = make_request(0, [1, 2, 3], max_tokens=6)
    completions, _ = run_all(engine, [request])
    (output,) = completions[0].outputs
    assert output.token_ids.tolist() == expected(request, 0, ends_at(length))
    assert (len(output.token_ids), output.finish_reason) == (length, "stop")
    ahead = engine._steps_ahead and length < 6
    assert len(runner.steps) == length + ahead

    engine, runner = make_engine(10)
    completions, _ = run_all(engine, [make_request(0, [1, 2, 3], max_tokens=length)])
    assert completions[0].outputs[0].finish_reason == "length"
    assert len(runner.steps) == length


def test_blocks_of_a_row_that_ends_by_length_serve_the_next_step(make_engine: MakeEngine) -> None:
    """The pool holds one row, whose blocks go to the next row before its last token is read."""
    engine, _ = make_engine(2)
    requests = [make_request(row, [row + 1] * 5, max_tokens=3, ignore_eos=True) for row in range(4)]
    completions, steps = run_all(engine, requests)
    assert len(steps) == 4 * 3
    for request in requests:
        tokens = completions[request.row_id].outputs[0].token_ids.tolist()
        assert tokens == expected(request, 0)


def test_a_row_that_ended_causes_no_preemption() -> None:
    """The newer row needs the blocks of the older row, which has ended."""

    def next_token(context: bytes, stream: int, sample: int, position: int) -> int:
        return EOS if (stream, position) == (0, 4) else hashed(context, stream, sample, position)

    engine, _ = make_engine(5, max_model_len=16, runs_ahead=True, next_token=next_token)
    requests = [
        make_request(0, [1, 1, 1, 1], max_tokens=9),
        make_request(1, [2, 2, 2, 2], max_tokens=9),
    ]
    completions, steps = run_all(engine, requests)
    assert max(step.num_running for step in steps) == 2
    assert sum(step.num_preempted for step in steps) == 0
    for request in requests:
        tokens = completions[request.row_id].outputs[0].token_ids.tolist()
        assert tokens == expected(request, 0, next_token)


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}])
def test_penalized_rows_see_every_token_and_delay_no_other_rows(params: dict[str, float]) -> None:
    engine, runner = make_engine(100, runs_ahead=True)
    penalized = make_request(0, [9, 9], max_tokens=4, **params)
    plain = [make_request(row, [row] * 3, max_tokens=8) for row in range(1, 7)]
    completions, _ = run_all(engine, [penalized, *plain])
    outputs = completions[0].outputs[0].token_ids.tolist()
    seen = [step.sampling.penalties for step in runner.steps]
    assert [None if p is None else p.output_token_ids.tolist() for p in seen] == [
        [[]],
        None,
        [outputs[:1]],
        None,
        [outputs[:2]],
        None,
        [outputs[:3]],
        None,
    ]
    assert len(runner.steps) == 8


def test_rows_that_are_all_penalized_run_together() -> None:
    engine, runner = make_engine(100, runs_ahead=True, max_num_seqs=8)
    rows = [make_request(row, [row], max_tokens=5, presence_penalty=1.0) for row in range(16)]
    run_all(engine, rows)
    assert [step.num_sequences for step in runner.steps] == [8] * 10


def test_samples_fork_into_the_table_row_of_a_row_that_ended() -> None:
    """Row 6 also has two samples; it takes row 0's table entry before row 0's token is read."""
    engine, _ = make_engine(100, max_tokens=30, runs_ahead=True)
    lengths, samples = [1, 4, 9, 9, 9, 9, 4], [2, 2, 1, 1, 1, 1, 2]
    requests = [
        make_request(row, [row + 1] * 5, max_tokens=length, n=n, ignore_eos=True)
        for row, (length, n) in enumerate(zip(lengths, samples, strict=True))
    ]
    completions, steps = run_all(engine, requests)
    assert [step.prefill_tokens for step in steps[:2]] == [6 * 5, 5]
    for request in requests:
        for output in completions[request.row_id].outputs:
            assert output.token_ids.tolist() == expected(request, output.index)


class Breaks(FakeRunner):
    """Gives row 1 NaN logits at one position of its samples."""

    position = 0

    def run(self, step: Step) -> StepResult:
        result = super().run(step)
        batch = step.sampling
        broken = (batch.stream == 1) & (batch.position == self.position)
        return replace(
            result,
            nonfinite=broken & (batch.sample_index == batch.sample_index[broken].max(initial=0)),
        )


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("position", range(5))
def test_a_row_with_nan_logits_fails_alone_at_any_place(
    make_engine: MakeEngine, position: int, n: int
) -> None:
    engine, _ = make_engine(60)
    engine._runner = runner = Breaks(60, 4)
    runner.position = position
    requests = [
        make_request(row, [row + 1] * 9, max_tokens=5, ignore_eos=True, n=n) for row in range(3)
    ]
    completions, _ = run_all(engine, requests)
    assert completions[1].error_code == "nan_logits"
    for row in (0, 2):
        assert completions[row].error_code is None
        for output in completions[row].outputs:
            assert output.token_ids.tolist() == expected(requests[row], output.index)
    again, _ = run_all(engine, [replace(requests[1], row_id=3, rng_key=(0, 3))])
    assert again[3].stats.cached_tokens == 0


@pytest.mark.parametrize("steps", range(7))
def test_rows_aborted_in_flight_leave_nothing_behind(make_engine: MakeEngine, steps: int) -> None:
    engine, _ = make_engine(30, max_tokens=8)
    requests = [make_request(row, [row + 1] * 7, max_tokens=5, n=2) for row in range(3)]
    for request in requests:
        engine.add_request(request)
    for _ in range(steps):
        engine.step()
    engine.abort_all()
    assert engine.scheduler.pool.num_used == engine.num_unfinished == 0
    check_scheduler(engine.scheduler)
    completions, _ = run_all(engine, requests)
    for request in requests:
        for output in completions[request.row_id].outputs:
            assert output.token_ids.tolist() == expected(request, output.index)


class StepError(Exception):
    """Simulates an error of the device."""


class Fails(FakeRunner):
    """Makes one step fail before it writes, either on submission or when its result is read."""

    def __init__(self, num_blocks: int, block_size: int, next_token: NextToken = hashed) -> None:
        super().__init__(num_blocks, block_size, next_token)
        self.left = -1
        """Number of steps left before the failure."""
        self.late = False

    def submit(self, step: Step) -> Ready:
        self.left -= 1
        if self.left == -1:
            if self.late:
                return self  # type: ignore[return-value]
            raise StepError
        if self.left < -1 and self.late:  # after a failure the device computes nothing
            return self  # type: ignore[return-value]
        return super().submit(step)

    def result(self) -> StepResult:
        raise StepError


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_blocks_that_a_failed_step_should_fill_are_not_found(
    make_engine: MakeEngine, steps: int, late: bool
) -> None:
    engine, _ = make_engine(40, max_tokens=8)
    engine._runner = runner = Fails(40, 4)
    requests = [make_request(row, [5] * 9 + [row] * 6, max_tokens=5) for row in range(4)]
    runner.left, runner.late = steps, late
    with pytest.raises(StepError):
        run_all(engine, requests)
    engine.abort_all()
    check_scheduler(engine.scheduler)
    runner.left, runner.late = 10**9, False
    completions, _ = run_all(engine, requests)  # the runner checks each context
    for request in requests:
        tokens = completions[request.row_id].outputs[0].token_ids.tolist()
        assert tokens == expected(request, 0)


def now_and_then_ends(context: bytes, stream: int, sample: int, position: int) -> int:
    token = hashed(context, stream, sample, position)
    return EOS if token % 5 == 0 else token


class EngineMachine(RuleBasedStateMachine):
    """Adds rows at any time, lets steps fail and aborts all rows; finished rows must be right."""

    @initialize(
        runs_ahead=st.booleans(),
        num_blocks=st.sampled_from([10, 20, 200]),
        max_num_seqs=st.sampled_from([2, 16]),
        max_tokens=st.sampled_from([5, 64]),
    )
    def make(self, runs_ahead: bool, num_blocks: int, max_num_seqs: int, max_tokens: int) -> None:
        self.engine: Engine
        self.engine, _ = make_engine(
            num_blocks, max_num_seqs=max_num_seqs, max_tokens=max_tokens, runs_ahead=runs_ahead
        )
        self.runner = Fails(num_blocks, 4, now_and_then_ends)
        self.engine._runner = self.runner
        self.requests: dict[int, Request] = {}

    @rule(
        shared=st.integers(0, 12),
        own=st.integers(1, 5),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 3]),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )
    def add(self, shared: int, own: int, max_tokens: int, n: int, penalty: float) -> None:
        row = len(self.requests)
        prompt = [7] * shared + [row + 1] * own
        request = make_request(row, prompt, max_tokens=max_tokens, n=n, presence_penalty=penalty)
        self.requests[row] = request
        self.engine.add_request(request)

    @rule(
        shared=st.integers(0, 12),
        own=st.integers(1, 5),
        max_tokens=st.integers(1, 12),
        width=st.sampled_from([1, 2, 4]),
        penalty=st.sampled_from([0.0, 1.0, 2.0]),
    )
    def add_search(
        self, shared: int, own: int, max_tokens: int, width: int, penalty: float
    ) -> None:
        row = len(self.requests)
        prompt = [7] * shared + [row + 1] * own
        request = beams(row, prompt, width, max_tokens=max_tokens, length_penalty=penalty)
        self.requests[row] = request
        self.engine.add_request(request)

    @rule(count=st.integers(1, 6))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.check(self.engine.step().completions)

    @rule(late=st.booleans())
    def fail(self, late: bool) -> None:
        self.runner.left, self.runner.late = 0, late
        try:
            while self.engine.num_unfinished:
                self.check(self.engine.step().completions)
        except StepError:
            self.engine.abort_all()
        self.runner.left = -(10**9) if not late else 10**9
        self.runner.late = False
        assert self.engine.num_unfinished == 0

    @rule()
    def abort(self) -> None:
        self.engine.abort_all()
        assert self.engine.scheduler.pool.num_used == 0

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "engine"):
            check_scheduler(self.engine.scheduler)

    def check(self, completions: list[Completion]) -> None:
        for completion in completions:
            request = completion.request
            if completion.error_code == "does_not_fit":
                continue
            assert completion.error_code is None
            if request.params.beam_width:
                assert_found(completion)
                continue
            assert len(completion.outputs) == request.params.n
            for output in completion.outputs:
                tokens = expected(request, output.index, now_and_then_ends)
                assert output.token_ids.tolist() == tokens

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for _ in range(1000):
                if not self.engine.num_unfinished:
                    break
                self.check(self.engine.step().completions)
            assert self.engine.num_unfinished == self.engine.scheduler.pool.num_used == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=15, deadline=None)


@pytest.mark.long
class TestEngineMachineLonger(EngineMachine.TestCase):
    settings = settings(max_examples=100, deadline=None)


def test_the_extra_token_reaches_no_other_row() -> None:
    """A row that ended still draws a token; the row that takes its place draws its own tokens."""
    engine, runner = make_engine(8, max_num_seqs=1, runs_ahead=True, next_token=ends_at(2))
    requests = [make_request(row, [row + 1] * 3, max_tokens=6) for row in range(3)]
    completions, _ = run_all(engine, requests)
    for request in requests:
        tokens = completions[request.row_id].outputs[0].token_ids.tolist()
        assert tokens == expected(request, 0, ends_at(2))
    assert sum(step.num_samples for step in runner.steps) == 3 * (2 + 1)
    assert np.all([step.num_sequences == 1 for step in runner.steps])
