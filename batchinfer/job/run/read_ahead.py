"""Delays reading a window until the engine will soon need its rows, to save memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from batchinfer.job.run.engine_loop import EngineLoop
from batchinfer.requests.requests import PromptRow

_POLL_S = 0.05
_MARGIN = 2.0


class ReadAhead:
    """Waits before each window, so that little more than one window is in memory.

    Reading a window should take as long as for the last one, and the engine should finish as many
    rows per second as before. Neither is certain: with long rows first, for example, the engine
    gets faster. Reading therefore begins when twice as many rows are left as should be needed, and
    some rows should be left at the end.

    Args:
        loop: the loop that takes the rows of the windows.
        spare_rows: number of rows that should be left once the next window is read.
        is_over: returns True if no more rows are needed.
    """

    def __init__(
        self,
        loop: EngineLoop,
        spare_rows: int,
        is_over: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._loop = loop
        self._spare_rows = spare_rows
        self._is_over = is_over
        self._clock = clock
        self._sleep = sleep
        self._num_planned = 0

    def counted(self, window: list[PromptRow]) -> list[PromptRow]:
        """Return a window that the loop will get, and count its rows."""
        self._num_planned += len(window)
        return window

    def wait(self, reading_s: float) -> None:
        """Wait until the next window should be read.

        Args:
            reading_s: seconds that it took to read the last window.
        """
        speed = _Speed(self._clock(), self._loop.num_finished, reading_s)
        while not self._is_over():
            rows_per_s = speed.at(self._clock(), self._loop.num_finished)
            rows_left = self._num_planned - self._loop.num_given
            if rows_left <= self._spare_rows + _MARGIN * reading_s * rows_per_s:
                return
            self._sleep(_POLL_S)


class _Speed:
    """The engine's rows per second: since the beginning or lately, whichever is larger.

    Args:
        span_s: seconds that count as lately.
    """

    def __init__(self, began: float, finished: int, span_s: float) -> None:
        self._span_s = span_s
        self._first = began, finished
        self._recent = deque([self._first])

    def at(self, now: float, finished: int) -> float:
        """Return the speed, given the number of finished rows at a time in seconds."""
        self._recent.append((now, finished))
        while now - self._recent[1][0] >= self._span_s and len(self._recent) > 2:
            self._recent.popleft()
        before = self._first, self._recent[0]
        return max((finished - rows) / max(now - at, _POLL_S) for at, rows in before)
