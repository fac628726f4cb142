"""When the next window is read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from batchinfer.job.run.engine_loop import EngineLoop
from batchinfer.job.run.read_ahead import ReadAhead
from batchinfer.requests.requests import PromptRow

ROWS, SPARE_ROWS = 1000, 50
READING_S = 10.0


class Clock:
    """A clock that only sleeping advances, and a loop that finishes ``rows_per_s`` rows per second
    after the first ``idle_s`` seconds."""

    def __init__(self, rows_per_s: float, idle_s: float = 0.0) -> None:
        self.now, self._rows_per_s, self._idle_s = 0.0, rows_per_s, idle_s
        self.loop = SimpleNamespace(num_given=0, num_finished=0)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        finished = int(max(0.0, self.now - self._idle_s) * self._rows_per_s)
        self.loop.num_given = self.loop.num_finished = min(ROWS, finished)


def wait(clock: Clock, is_over: Callable[[], bool] = lambda: False) -> int:
    """Wait while the loop runs a window of ``ROWS`` rows; return how many of them are left."""
    loop, window = cast(EngineLoop, clock.loop), cast(list[PromptRow], [None] * ROWS)
    read_ahead = ReadAhead(loop, SPARE_ROWS, is_over, clock=clock, sleep=clock.sleep)
    assert read_ahead.counted(window) is window
    read_ahead.wait(READING_S)
    return ROWS - clock.loop.num_given


@pytest.mark.parametrize("rows_per_s", [5.0, 20.0])
def test_reading_begins_when_the_rows_left_last_until_it_ends(rows_per_s: float) -> None:
    rows_left = wait(Clock(rows_per_s))
    assert rows_left == pytest.approx(SPARE_ROWS + 2 * READING_S * rows_per_s, abs=rows_per_s)


def test_reading_begins_at_once_if_the_engine_is_as_fast_as_reading() -> None:
    clock = Clock(rows_per_s=ROWS / READING_S)
    wait(clock)
    assert clock.now < 1


def test_reading_begins_in_time_if_the_first_rows_finish_late() -> None:
    clock = Clock(rows_per_s=5.0, idle_s=20.0)
    assert wait(clock) - 5.0 * READING_S > 0


def test_reading_begins_in_time_if_the_engine_gets_faster() -> None:
    clock = Clock(rows_per_s=5.0)
    slow = clock.sleep

    def sleep(seconds: float) -> None:
        slow(seconds)
        fast = int(max(0.0, clock.now - 100) * 30)  # after 500 rows, 35 rows a second
        clock.loop.num_given = clock.loop.num_finished = clock.loop.num_finished + fast

    clock.sleep = sleep  # type: ignore[method-assign]
    assert wait(clock) >= 35 * READING_S


def test_waiting_ends_with_the_run() -> None:
    clock = Clock(rows_per_s=0.0)
    assert wait(clock, is_over=lambda: clock.now > 3) == ROWS
    assert 3 < clock.now < 4
