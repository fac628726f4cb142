"""The number of threads follows the free cores of a simulated machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.worker.threads.governor import ThreadGovernor, run_delay

CORES = 4


class Machine:
    """Simulates steps on a machine where other processes keep ``busy`` of the four cores busy.

    A thread without its own core delays the others by ``penalty`` times the work.
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
        """Run steps for this many seconds; return the numbers of threads that they ran on."""
        end, seen = self.seconds + seconds, set()
        while self.seconds < end:
            seen.add(self.governor.count)
            self.step(64)
        return seen


def test_all_threads_compute_while_nothing_else_runs() -> None:
    assert Machine().run(60) == {CORES}


@pytest.mark.parametrize(("busy", "settled"), [(1, 3), (2, 2), (3, 1)])
def test_thread_count_follows_the_free_cores(
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
    machine.busy = busy  # a second reduction is not logged
    machine.run(60)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    down, back = (record.getMessage() for record in caplog.records)
    assert down.startswith(f"using {settled} of 4 threads while other processes use the cores")
    assert back == "using all 4 threads again"


def test_thread_count_falls_if_other_processes_ran_first() -> None:
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


def test_fewer_threads_are_given_up_if_steps_are_no_faster() -> None:
    """All cores are equally busy, so a step takes twice as long with half the threads."""
    machine = Machine(penalty=0.0)
    machine.busy = CORES
    machine.run(100)
    assert machine.governor.count == CORES


def test_more_threads_are_tried_while_cores_are_short() -> None:
    """A thread gets a small share of a busy core; four threads get four times as much."""
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


def slow_without_delay(at: int) -> tuple[float, float | None]:
    """Steps may be slow because the processor is throttled or contexts have grown."""
    return 0.01 if at < 100 else 0.1, 0.0


def slow_with_unknown_delay(at: int) -> tuple[float, float | None]:
    return 0.01 * (1 + at), None


def cheap_delay(at: int) -> tuple[float, float | None]:
    """Low-priority processes cause such small delays."""
    return (0.01, 0.0) if at < 100 else (0.013, 0.0065)


def shrinking_delay(at: int) -> tuple[float, float | None]:
    """The sum of delays shrinks when threads end, because it covers only living threads."""
    return 0.1, -1.0


@pytest.mark.parametrize(
    "step", [slow_without_delay, slow_with_unknown_delay, cheap_delay, shrinking_delay]
)
def test_all_threads_compute_unless_delays_make_steps_slow(
    step: Callable[[int], tuple[float, float | None]],
) -> None:
    total: list[float | None] = [0.0]
    governor = ThreadGovernor(CORES, delay=lambda: total[0])
    for at in range(1000):
        seconds, delay = step(at)
        governor.begin()
        total[0] = None if delay is None or total[0] is None else total[0] + delay
        governor.observe(64, seconds)
        assert governor.count == CORES


def test_delays_between_steps_do_not_count() -> None:
    """Between calls, the caller's own threads may wait, and steps may be slow for other reasons."""
    delay = 0.0
    governor = ThreadGovernor(CORES, delay=lambda: delay)
    for at in range(20):  # each step is long enough to be measured on its own
        delay += 100.0
        governor.begin()
        governor.observe(64, 3.0 if at < 10 else 30.0)
        assert governor.count == CORES


def test_thread_counts_that_cannot_pay_off_are_not_tried() -> None:
    """Other processes always use an eighth of the cores, so half the threads cannot be faster."""
    delay = 0.0
    governor = ThreadGovernor(CORES, delay=lambda: delay)
    for _ in range(1000):
        governor.begin()
        delay += 0.4 * 0.05
        governor.observe(64, 0.05)
        assert governor.count > CORES // 2


def test_a_trial_of_long_steps_ends_with_the_first_slower_one() -> None:
    delay, tried = 0.0, 0
    governor = ThreadGovernor(CORES, delay=lambda: delay)
    for _ in range(8):
        count = governor.begin()
        seconds = 0.5 if count == CORES else 0.8
        delay += 0.6 * seconds
        governor.observe(64, seconds)
        tried += count < CORES
    assert tried == 1


@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_all_threads_come_back_after_the_delay_was_unknown(seconds: float) -> None:
    """The delay is unknown if the process can open no more files; trials then end."""
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


def test_one_thread_never_reads_the_delay() -> None:
    def never() -> float:
        raise AssertionError("the directory of all threads was read")

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
def test_the_number_of_threads_stays_in_bounds_and_comes_back(
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


def test_run_delay_of_this_process() -> None:
    first = run_delay()
    second = run_delay()
    if first is None or second is None:
        pytest.skip("this kernel does not report run delays")
    assert first >= 0.0


def test_run_delay_is_unknown_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.listdir", missing)
    assert run_delay() is None


def test_run_delay_leaves_out_threads_that_have_ended(tmp_path: Path) -> None:
    for thread in ("7", "8"):
        (tmp_path / thread).mkdir()
    assert run_delay(str(tmp_path)) is None
    (tmp_path / "7" / "schedstat").write_text("9000000000 1500000000 12\n")
    assert run_delay(str(tmp_path)) == 1.5
