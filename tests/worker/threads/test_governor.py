"""Threads step down while others use the cores and come back, on a machine that is made up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.worker.threads.governor import ThreadGovernor, run_delay

CORES = 4


class Machine:
    """Steps on a machine whose other processes keep ``busy`` of its four cores.

    A thread without a core of its own holds up the others ``penalty`` times as long as the work.
    """

    def __init__(self, penalty: float = 20.0) -> None:
        self.busy = 0
        self.penalty = penalty
        self.delay = 0.0
        self.unknown = False
        self.seconds = 0.0
        self.governor = ThreadGovernor(CORES, delay=self.read)

    def read(self) -> float | None:
        return None if self.unknown else self.delay

    def step(self, tokens: int) -> None:
        count = self.governor.begin()
        crowded = max(0, count + self.busy - CORES)
        seconds = 1e-3 * tokens / count * (1 + self.penalty * (crowded > 0))
        self.delay += 0.9 * crowded * seconds
        self.seconds += seconds
        self.governor.observe(tokens, seconds)

    def run(self, seconds: float) -> set[int]:
        """Steps for so long: the numbers of threads that they ran on."""
        end, seen = self.seconds + seconds, set()
        while self.seconds < end:
            seen.add(self.governor.count)
            self.step(64)
        return seen


def test_all_threads_compute_while_nothing_else_runs() -> None:
    assert Machine().run(60) == {CORES}


@pytest.mark.parametrize(("busy", "settled"), [(1, 3), (2, 2), (3, 1)])
def test_threads_leave_the_cores_that_others_use_and_take_them_back(
    busy: int, settled: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    machine.run(5)
    machine.busy = busy
    machine.run(20)
    assert machine.governor.count == settled
    machine.busy = 0
    machine.run(60)
    assert machine.governor.count == CORES
    assert machine.run(30) == {CORES}
    machine.busy = busy  # and once more, without a word
    machine.run(60)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    down, back = (record.getMessage() for record in caplog.records)
    assert down.startswith(f"{settled} of 4 threads while other processes use the cores")
    assert back == "all 4 threads again"


def test_they_step_down_where_others_were_there_before_them() -> None:
    machine = Machine()
    machine.busy = 2
    machine.run(20)
    assert machine.governor.count == 2


def test_trials_of_more_threads_become_rare_while_they_fail() -> None:
    machine = Machine(penalty=100.0)
    machine.busy = 1
    machine.run(200)
    began, lost = machine.seconds, 0.0
    while machine.seconds < began + 200:
        before, count = machine.seconds, machine.governor.count
        machine.step(64)
        lost += (machine.seconds - before) if count == CORES else 0.0
    assert 0 < lost < 0.1 * 200


def test_fewer_threads_that_are_no_better_are_given_up() -> None:
    """Every core is shared alike: with half the threads a step takes twice as long."""
    machine = Machine(penalty=0.0)
    machine.busy = CORES
    machine.run(100)
    assert machine.governor.count == CORES


def test_more_threads_are_tried_while_cores_are_short() -> None:
    """A thread that shares its core with many gets little; four get four times as much."""
    delay, best = [0.0], 1
    governor = ThreadGovernor(CORES, delay=lambda: delay[0])
    for at in range(4000):
        best = 1 if at < 1000 else CORES
        seconds = 0.05 if governor.begin() == best else 0.2
        delay[0] += seconds
        governor.observe(64, seconds)
        if at == 999:
            assert governor.count == 1
    assert governor.count == CORES


def test_slow_steps_alone_are_no_reason() -> None:
    """The processor may be throttled, or attention read longer contexts: nobody waits for cores."""
    governor = ThreadGovernor(CORES, delay=lambda: 0.0)
    for at in range(1000):
        governor.begin()
        governor.observe(64, 0.01 if at < 100 else 0.1)
        assert governor.count == CORES


def test_delays_that_cost_little_are_no_reason() -> None:
    """As beside processes of low priority."""
    delay = [0.0]
    governor = ThreadGovernor(CORES, delay=lambda: delay[0])
    for at in range(1000):
        slow = at >= 100
        seconds = 0.013 if slow else 0.01
        governor.begin()
        delay[0] += seconds * 0.5 * slow
        governor.observe(64, seconds)
        assert governor.count == CORES


def test_numbers_that_would_cost_more_than_the_delays_are_not_tried() -> None:
    """Others were there first and use an eighth of the cores: half of the threads cannot win."""
    delay = 0.0
    governor = ThreadGovernor(CORES, delay=lambda: delay)
    for _ in range(1000):
        governor.begin()
        delay += 0.4 * 0.05
        governor.observe(64, 0.05)
        assert governor.count > CORES // 2


def test_a_trial_of_long_steps_ends_with_the_first_that_is_slower() -> None:
    delay, tried = 0.0, 0
    governor = ThreadGovernor(CORES, delay=lambda: delay)
    for _ in range(8):
        count = governor.begin()
        seconds = 0.5 if count == CORES else 0.8
        delay += 0.6 * seconds
        governor.observe(64, seconds)
        tried += count < CORES
    assert tried == 1


@pytest.mark.parametrize("known", [None, 0.0])
def test_without_a_known_delay_the_number_stays(known: float | None) -> None:
    governor = ThreadGovernor(CORES, delay=lambda: known)
    for at in range(200):
        governor.begin()
        governor.observe(64, 0.01 * (1 + at))
    assert governor.count == CORES


def test_a_delay_that_shrinks_is_none() -> None:
    """Threads that end take their part of the sum with them."""
    sums = iter([5.0] + [4.0 - at for at in range(10_000)])
    governor = ThreadGovernor(CORES, delay=lambda: next(sums))
    for _ in range(1000):
        governor.begin()
        governor.observe(64, 0.1)
        assert governor.count == CORES


@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_a_delay_that_is_not_known_for_a_while_keeps_no_thread_away(seconds: float) -> None:
    """As while the process may open no more files: trials end, and all threads come back."""
    machine = Machine()
    machine.busy = 3
    while machine.governor.count == CORES:
        machine.step(64)
    machine.unknown = True
    machine.run(seconds)
    machine.busy = 0
    if seconds < 1:
        machine.unknown = False
    machine.run(60)
    assert machine.governor.count == CORES
    machine.unknown = False
    machine.busy = 3
    machine.run(30)
    assert machine.governor.count == 1


def test_delays_between_steps_are_no_reason() -> None:
    """As of the caller's own threads between two calls, where steps are slow for other reasons."""
    delay = 0.0
    governor = ThreadGovernor(CORES, delay=lambda: delay)
    for at in range(20):  # each long enough to be judged alone
        delay += 100.0
        governor.begin()
        governor.observe(64, 3.0 if at < 10 else 30.0)
        assert governor.count == CORES


def test_one_thread_asks_for_nothing() -> None:
    def never() -> float:
        raise AssertionError("a directory of all threads is read")

    governor = ThreadGovernor(1, delay=never)
    for _ in range(100):
        governor.begin()
        governor.observe(1, 1.0)
    assert governor.count == 1


@given(
    busy=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 4096), min_size=1, max_size=30),
    penalty=st.floats(0.0, 200.0),
)
def test_the_number_is_always_within_bounds_and_comes_back(
    busy: list[int], sizes: list[int], penalty: float
) -> None:
    machine = Machine(penalty)
    for others in busy:
        machine.busy = others
        for at in range(100):
            machine.step(sizes[at % len(sizes)])
            assert 1 <= machine.governor.count <= CORES
    machine.busy = 0
    machine.run(300)
    assert machine.governor.count == CORES


def test_the_kernel_tells_the_delay_of_this_process() -> None:
    first = run_delay()
    second = run_delay()
    if first is None or second is None:
        pytest.skip("this kernel does not tell")
    assert first >= 0.0


def test_a_system_that_does_not_tell_has_no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.listdir", missing)
    assert run_delay() is None


def test_threads_that_have_ended_are_left_out_and_a_kernel_without_the_file_tells_nothing(
    tmp_path: Path,
) -> None:
    for thread in ("7", "8"):
        (tmp_path / thread).mkdir()
    assert run_delay(str(tmp_path)) is None
    (tmp_path / "7" / "schedstat").write_text("9000000000 1500000000 12\n")
    assert run_delay(str(tmp_path)) == 1.5
