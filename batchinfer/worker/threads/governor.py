"""Thread governor: computes on fewer threads while other processes use the cores.

Every matrix multiplication waits for its slowest thread, so a thread without a core delays all
other threads. Such delays increase the run delay: the time for which threads were ready to run but
did not run (the second number in ``/proc/PID/schedstat``, see the kernel's
Documentation/scheduler/sched-stats.rst). If the run delay is large, the governor measures whether
fewer threads are faster. The governor is used only for batch-invariant kernels, which give the same
bits with any number of threads. Other kernels may split a row's sums among threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from statistics import median

_LOG = logging.getLogger(__name__)

_WINDOW_S = 0.25
_WINDOW_STEPS = 6
"""A window is judged when it has at least this many steps, and they took ``_WINDOW_S`` seconds or
more."""
_PATIENCE_S = 2.0
"""A window with fewer than ``_WINDOW_STEPS`` steps is judged when its steps took this many
seconds."""
_SLOW = 2.0
"""Fewer threads are tried only if steps take at least this many times as long as on a quiet
machine."""
_DELAYED = 0.25
"""Other processes are assumed to use the cores if the run delay per second, summed over all
threads, is at least this."""
_WORTH = 0.9
"""Fewer threads are kept if steps take at most this share of the time that more threads took."""
_FIRST_PAUSE, _LAST_PAUSE = 4, 128
"""Smallest and largest number of windows to wait after all trials have failed. The wait doubles
each time all trials fail again."""


def run_delay(tasks: str = "/proc/self/task") -> float | None:
    """Return the run delay of this process in seconds, or None if the kernel does not measure it.
    Threads that have ended are not counted. ``tasks`` is a folder that contains a folder for each
    thread."""
    delays: list[int] = []
    try:
        for thread in os.listdir(tasks):
            try:
                with open(f"{tasks}/{thread}/schedstat", "rb") as file:
                    delays.append(int(file.read().split()[1]))
            except (FileNotFoundError, ProcessLookupError):
                continue  # this thread has ended
    except (OSError, ValueError, IndexError):
        return None
    return sum(delays) / 1e9 if delays else None


class _Window:
    """Consecutive steps that are judged together."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.delay: float | None = None
        """The process's run delay when the first step began."""
        # Seconds per token, keyed by the bit length of the step's token count.
        self._paces: dict[int, list[float]] = {}

    def add(self, tokens: int, seconds: float) -> None:
        self.seconds += seconds
        self._paces.setdefault(tokens.bit_length(), []).append(seconds / max(1, tokens))

    @property
    def is_empty(self) -> bool:
        return not self._paces

    @property
    def is_full(self) -> bool:
        steps = sum(map(len, self._paces.values()))
        return self.seconds >= (_WINDOW_S if steps >= _WINDOW_STEPS else _PATIENCE_S)

    def medians(self) -> dict[int, float]:
        """Return the median seconds per token for each size of step."""
        return {size: median(paces) for size, paces in self._paces.items()}

    def ratio_to(self, before: dict[int, float]) -> float | None:
        """Return the median ratio of this window's times per token to the times in ``before``, for
        steps of the same size; None if no sizes are the same."""
        paces = self.medians().items()
        ratios = [pace / before[size] for size, pace in paces if before.get(size)]
        return median(ratios) if ratios else None

    def is_lost_to(self, before: dict[int, float]) -> bool:
        """Return true if a trial is so slow that it should end early. Without this check, a trial
        in which steps take a hundred times as long would last too long."""
        ratio = self.ratio_to(before)
        return ratio is not None and ratio > (1.0 if self.seconds >= _WINDOW_S else _SLOW)


class ThreadGovernor:
    """Chooses the number of threads from the times of earlier steps.

    Args:
        most: largest number of threads, with which the governor starts.
        delay: returns the process's run delay in seconds. While ``delay`` returns None, fewer
            threads are not tried.
    """

    def __init__(self, most: int, delay: Callable[[], float | None] = run_delay) -> None:
        self.count = most
        self._most = most
        self._read_delay = delay
        # The numbers of threads to try: all, a half, a quarter, and so on; and also three quarters,
        # because other processes may use only a core or two.
        self._counts = {most >> by for by in range(most.bit_length())} | {most - most // 4}
        # Seconds per token on all threads while no other process uses the cores.
        self._quiet: dict[int, float] = {}
        self._num_logged = 0
        self._window = _Window()
        self._decisions = self._decide()
        next(self._decisions)

    def begin(self) -> int:
        """Return the number of threads for the step that begins now."""
        # Read the run delay when a window begins, so that earlier delays do not count.
        if self._most > 1 and self._window.is_empty:
            self._window.delay = self._read_delay()
        return self.count

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the time that a step of ``tokens`` tokens took on ``count`` threads."""
        if self._most > 1:
            self._window.add(tokens, seconds)
            next(self._decisions)

    def _decide(self) -> Generator[None, None, None]:
        """Judge windows of steps one after another, and set ``count``. ``observe`` resumes this
        generator after each step."""
        pause = _FIRST_PAUSE
        while True:
            window = yield from self._next_window()
            counts = self._worth_trying(window)
            for count in counts:
                if (yield from self._try(count, window.medians())):
                    pause = _FIRST_PAUSE
                    self._log_change()
                    break
                window = yield from self._next_window()
            else:
                for _ in range(pause if counts else 0):
                    yield from self._next_window()
                pause = min(2 * pause, _LAST_PAUSE) if counts else pause

    def _next_window(
        self, baseline: dict[int, float] | None = None
    ) -> Generator[None, None, _Window]:
        """Wait until a new window is full, or is clearly slower than ``baseline``."""
        self._window = window = _Window()
        while not (window.is_full or (baseline and window.is_lost_to(baseline))):
            yield
        return window

    def _try(self, count: int, baseline: dict[int, float]) -> Generator[None, None, bool]:
        """Compute a window on ``count`` threads, and keep this number if it is faster than
        before."""
        fallback, self.count = self.count, count
        ratio = (yield from self._next_window(baseline)).ratio_to(baseline)
        if ratio is not None and ratio <= (_WORTH if count < fallback else 1.0):
            return True
        self.count = fallback
        return False

    def _worth_trying(self, window: _Window) -> list[int]:
        """Return numbers of threads to try, or none while all threads are used and have enough
        cores.

        Fewer threads wait less for each other; more threads get a larger share of the machine's
        cores. Fewer threads can save at most the share of time for which threads were delayed, so a
        number of threads that would lose more than this share is not tried.
        """
        share = self._delayed_share(window)
        delayed = share is not None and share >= _DELAYED
        if self.count == self._most:
            if not delayed:
                self._quiet |= {} if share is None else window.medians()
                return []
            slower = window.ratio_to(self._quiet)
            if slower is not None and slower < _SLOW:
                return []
        lost = share if delayed and share is not None else 0.0
        fewer = [c for c in self._counts if c < self.count and lost > 1 - c / self.count]
        return sorted(fewer, reverse=True) + sorted(c for c in self._counts if c > self.count)

    def _delayed_share(self, window: _Window) -> float | None:
        """Return a window's run delay per second, or None if it is unknown, for example because no
        more files can be opened."""
        before, after = window.delay, self._read_delay()
        if before is None or after is None:
            return None
        # The difference may be negative, because threads that have ended are no longer counted.
        return max(0.0, after - before) / window.seconds

    def _log_change(self) -> None:
        if self.count < self._most and self._num_logged == 0:
            self._num_logged = 1
            _LOG.warning(
                "using %d of %d threads while other processes use the cores (to "
                "fix the number, set engine.num_threads)",
                *(self.count, self._most),
            )
        elif self.count == self._most and self._num_logged == 1:
            self._num_logged = 2
            _LOG.warning("using all %d threads again", self.count)
