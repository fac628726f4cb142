"""Delays reading a window until the engine will soon need its rows, to save memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from batchinfer.job.run.engine_loop import EngineLoop
from batchinfer.requests.requests import PromptRow

_POLL_S = 0.05


class ReadAhead:
    """Waits before each window, so that little more than one window is in memory.

    Reading a window should take as long as for the last one, and the engine should finish as many
    rows per second as since then. Neither is certain, so some rows should be left at the end.

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
        began, finished = self._clock(), self._loop.num_finished
        while not self._is_over():
            seconds = self._clock() - began
            rows_per_s = (self._loop.num_finished - finished) / seconds if seconds else 0.0
            rows_left = self._num_planned - self._loop.num_given
            if rows_left <= self._spare_rows + reading_s * rows_per_s:
                return
            self._sleep(_POLL_S)
