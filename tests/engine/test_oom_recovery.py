"""After a step runs out of memory, smaller steps give the same outputs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.engine import Engine
from batchinfer.engine.images import Image, PromptImage
from batchinfer.engine.oom_recovery import Recovered
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.runner import OutOfMemory, Ready
from batchinfer.engine.stats import StepStats
from batchinfer.engine.step import Step, StepResult
from batchinfer.errors import DeviceError, ExitCode
from tests.engine.fake import FakeRunner, expected, hashed, make_engine, make_request
from tests.engine.invariants import check_scheduler
from tests.engine.searches import assert_found, beams

GARBAGE = -7
When = Literal["submitted", "read"]


def with_image(request: Request, num_tokens: int) -> Request:
    """Return the request with an image after its first token, which a step must not cut."""
    image = Image(0, dict, num_tokens, attends_both_ways=True)
    places = np.arange(1, num_tokens + 1, dtype=np.int32)
    return replace(request, images=(PromptImage(image, places),))


class Failed:
    """A failed step in flight."""

    def __init__(self, runner: Scarce, *, says_so: bool) -> None:
        self._runner = runner
        self._says_so = says_so

    def result(self) -> StepResult:
        assert self._says_so, "a step after a failed step is read"
        self._runner.has_failed = False
        raise OutOfMemory("no memory left")


class Scarce(FakeRunner):
    """Runs out of memory in some steps, and writes garbage into their slots.

    Steps that are submitted before the failure is read fail, too.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_submitted = 0
        self.fails_at: Collection[int] = ()
        self.when: When = "submitted"
        self.has_failed = False

    def submit(self, step: Step) -> Ready:
        number, self.num_submitted = self.num_submitted, self.num_submitted + 1
        if self.has_failed:
            self._spoil(step)
            return Failed(self, says_so=False)  # type: ignore[return-value]
        if number not in self.fails_at:
            return super().submit(step)
        self._spoil(step)
        if self.when == "submitted":
            raise OutOfMemory("no memory left")
        self.has_failed = True
        return Failed(self, says_so=True)  # type: ignore[return-value]

    def _spoil(self, step: Step) -> None:
        for kv in self._kept:
            kv.ravel()[step.slot_mapping] = GARBAGE
            kv[step.block_copies[:, 1]] = GARBAGE
            kv[step.swap_ins[:, 1]] = GARBAGE
        self.host[step.swap_outs[:, 1]] = GARBAGE


def ends_seldom(context: bytes, stream: int, sample: int, position: int) -> int:
    token = hashed(context, stream, sample, position)
    return 0 if token % 17 == 0 else token


def workload() -> list[Request]:
    """Return rows that share prefixes, some with samples, beam searches or penalties."""
    rows: list[Request] = []
    for row in range(8):
        prompt = [5] * (row % 3) * 5 + [row + 1] * (3 + row % 4)
        match row % 4:
            case 0:
                rows.append(make_request(row, prompt, max_tokens=9, n=3))
            case 1:
                rows.append(beams(row, prompt, 2, max_tokens=6))
            case 2:
                rows.append(make_request(row, prompt, max_tokens=12, presence_penalty=0.5))
            case _:
                rows.append(make_request(row, prompt, max_tokens=11))
    return rows


def scarce(num_blocks: int = 24, **options: Any) -> tuple[Engine, Scarce]:
    engine, _ = make_engine(num_blocks, next_token=ends_seldom, **options)
    host_blocks = options.get("host_blocks", 0)
    windows, per_state = options.get("windows", (0,)), options.get("slots_per_state", 0)
    engine._runner = runner = Scarce(num_blocks, 4, ends_seldom, host_blocks, windows, per_state)
    return engine, runner


def run(
    engine: Engine, requests: list[Request]
) -> tuple[list[Completion], list[StepStats], list[Recovered]]:
    """Run all requests; check their outputs, and that all blocks are free afterwards."""
    for request in requests:
        engine.add_request(request)
    completions: list[Completion] = []
    steps, recoveries = [], []
    for _ in range(2000):
        if not engine.num_unfinished:
            break
        outcome = engine.step()
        check_scheduler(engine.scheduler)
        completions += outcome.completions
        steps += [outcome.stats] if outcome.stats else []
        recoveries += [outcome.recovered] if outcome.recovered else []
    assert not engine.num_unfinished, "a row never ended"
    assert engine.scheduler.pool.num_used == engine.num_running == engine.num_waiting == 0
    assert sorted(done.request.row_id for done in completions) == [r.row_id for r in requests]
    for done in completions:
        if done.request.params.beam_width:
            assert_found(done)
            continue
        assert [output.index for output in done.outputs] == list(range(done.request.params.n))
        for output in done.outputs:
            tokens = expected(done.request, output.index, ends_seldom)
            assert output.token_ids.tolist() == tokens
    return completions, steps, recoveries


SETUPS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "preempting": {},
    "swapping": {"host_blocks": 50, "preemption": "swap"},
    "swapping_to_little": {"host_blocks": 3, "preemption": "swap"},
    "not_caching": {"caching": False},
    "in_chunks": {"max_tokens": 9},
    "windows": {"windows": (0, 6), "num_blocks": 60},
    "swapping_states": {"slots_per_state": 2, "host_blocks": 50, "preemption": "swap"},
}


@pytest.mark.parametrize("when", ["submitted", "read"])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("setup", SETUPS)
def test_any_step_may_fail(setup: str, runs_ahead: bool, when: When) -> None:
    options = SETUPS[setup] | {"runs_ahead": runs_ahead}
    engine, runner = scarce(**options)
    _, _, recoveries = run(engine, workload())
    assert not recoveries
    num_steps, most = runner.num_submitted, engine.scheduler.max_num_batched_tokens
    assert num_steps > 10
    # Test even steps with ``submitted``, and odd steps with ``read``.
    for at in range(when == "read", num_steps, 2):
        engine, runner = scarce(**options)
        runner.fails_at, runner.when = {at}, when
        completions, steps, recoveries = run(engine, workload())
        # An engine that runs ahead may never read its last step.
        assert [event.max_num_batched_tokens for event in recoveries] == [most // 2]
        recomputed = sum(done.stats.recomputed_tokens for done in completions)
        if when == "submitted":  # statistics do not count the work of lost steps
            assert sum(step.recomputed_tokens for step in steps) == recomputed
            prompts = sum(done.stats.prompt_tokens for done in completions)
            cached = sum(done.stats.cached_tokens for done in completions)
            prefill = sum(step.prefill_tokens for step in steps)
            assert prefill == prompts - cached + recomputed


@given(
    fails_at=st.sets(st.integers(0, 60), min_size=1, max_size=5),
    when=st.sampled_from(["submitted", "read"]),
    setup=st.sampled_from([name for name in sorted(SETUPS) if name != "windows"]),
    num_blocks=st.sampled_from([14, 24, 60]),
    runs_ahead=st.booleans(),
)
def test_steps_may_fail_again_and_again(
    fails_at: set[int], when: When, setup: str, num_blocks: int, runs_ahead: bool
) -> None:
    options = SETUPS[setup] | {"max_tokens": 128, "num_blocks": num_blocks}
    engine, runner = scarce(**options, runs_ahead=runs_ahead)
    runner.fails_at, runner.when = fails_at, when
    _, _, recoveries = run(engine, workload())
    assert len(recoveries) <= len(fails_at)
    assert engine.scheduler.max_num_batched_tokens == 128 >> len(recoveries)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([make_request(0, [7] * 9, max_tokens=5)], [32, 16, 8, 4, 2, 1]),
        ([beams(0, [7] * 9, 3, max_tokens=5)], [32, 16, 8, 4, 3]),
        ([with_image(make_request(0, [7] * 9, max_tokens=5), 6)], [32, 16, 8, 6]),
    ],
    ids=["a_row", "a_search", "an_image_that_must_be_whole"],
)
def test_a_device_without_memory_for_the_smallest_step_ends_the_run(
    requests: list[Request], sizes: list[int], runs_ahead: bool
) -> None:
    engine, runner = scarce(runs_ahead=runs_ahead)
    runner.fails_at = range(1000)
    for request in requests:
        engine.add_request(request)
    for size in sizes:
        recovered = engine.step().recovered
        assert recovered.max_num_batched_tokens == size
    with pytest.raises(DeviceError, match=rf"tokens: {sizes[-1]}\).*no memory left") as raised:
        engine.step()
    assert raised.value.exit_code is ExitCode.DEVICE
    assert "lower engine.kv_cache_memory" in str(raised.value)
    engine.abort_all()
    runner.fails_at = ()
    run(engine, requests)


def test_a_later_beam_search_gets_larger_steps() -> None:
    engine, runner = scarce(max_tokens=8)
    runner.fails_at = {0, 1, 2}
    run(engine, [make_request(0, [7] * 9, max_tokens=5)])
    assert engine.scheduler.max_num_batched_tokens == 1
    run(engine, [beams(1, [7] * 9, 3, max_tokens=5)])
    assert engine.scheduler.max_num_batched_tokens == 3


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    engine, runner = scarce(60)
    runner.fails_at = {4}
    (done,), steps, (event,) = run(engine, [make_request(0, [7] * 16, max_tokens=8)])
    assert (event.num_preempted, done.stats.preemptions) == (1, 1)
    # The row had drawn three tokens and computed two of them; the prompt's last block is lost, too.
    assert 3 <= done.stats.recomputed_tokens <= 4
    assert sum(step.prefill_tokens for step in steps) == 16 + done.stats.recomputed_tokens


def test_smaller_steps_stay_small() -> None:
    engine, runner = scarce(200)
    runner.fails_at = {0}
    _, steps, _ = run(engine, workload())
    assert max(step.prefill_tokens + step.decode_tokens for step in steps) <= 32
