"""Thread governor: fewer threads while other processes use the cores, and all of them afterwards.

Every product waits for its slowest thread, so one that lacks a core holds up all. What tells that
threads lack cores is the time that they were ready to run and did not (run delay, the second number
of ``/proc/PID/schedstat``: the kernel's Documentation/scheduler/sched-stats.rst). Whether fewer
are any better then is tried, never assumed. Results are the same with any number by kernels that
keep a row's bits, the only ones to be governed: others may split a row's sums among the threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

_LOG = logging.getLogger(__name__)

_WINDOW_S = 0.25
_WINDOW_STEPS = 6
"""Steps are judged together until they are so many and took so long."""
_PATIENCE_S = 2.0
"""A window that takes so long is judged when it has fewer steps, if at least one."""
_SLOW = 2.0
"""Times their own median that steps must take before fewer threads are tried."""
_DELAYED = 0.25
"""Run delay a second, over all threads, above which others use the cores."""
_WORTH = 0.9
"""Share of the time that steps may take with fewer threads for these to be kept."""
_FIRST_PAUSE, _LAST_PAUSE = 4, 128
"""Windows without a trial after all others failed, doubled when they fail again."""


def run_delay(tasks: str = "/proc/self/task") -> float | None:
    """Seconds that the threads of this process were ready to run and did not, in all.

    None where the kernel does not say. Threads that have ended are left out.

    Args:
        tasks: folder with one of each thread.
    """
    delays: list[int] = []
    try:
        for thread in os.listdir(tasks):
            try:
                with open(f"{tasks}/{thread}/schedstat", "rb") as file:
                    delays.append(int(file.read().split()[1]))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended, as not all can have
    except (OSError, ValueError, IndexError):
        return None
    return sum(delays) / 1e9 if delays else None


@dataclass
class _Window:
    """A window of steps, judged together."""

    seconds: float = 0.0
    paces: dict[int, list[float]] = field(default_factory=dict)
    """Seconds a token, by size of the step."""

    def add(self, tokens: int, seconds: float) -> None:
        self.seconds += seconds
        self.paces.setdefault(tokens.bit_length(), []).append(seconds / max(1, tokens))

    @property
    def is_full(self) -> bool:
        steps = sum(map(len, self.paces.values()))
        return self.seconds >= (_WINDOW_S if steps >= _WINDOW_STEPS else _PATIENCE_S)

    def medians(self) -> dict[int, float]:
        return {size: median(paces) for size, paces in self.paces.items()}


def _ratio(now: Mapping[int, float], before: Mapping[int, float]) -> float | None:
    """Ratio of the time of steps now to that of equal ones before; None without any."""
    ratios = [pace / before[size] for size, pace in now.items() if before.get(size)]
    return median(ratios) if ratios else None


def _numbers(most: int) -> list[int]:
    """Numbers of threads that are tried: all, three quarters for when others use a core or two, a
    half and so on; the most first."""
    halves = {most >> by for by in range(most.bit_length())}
    return sorted(halves | {most - most // 4}, reverse=True)


class ThreadGovernor:
    """Governor of the number of threads, by the time of the steps before.

    Args:
        most: threads to begin with, and never more.
        delay: run delay of the process so far in seconds, or None where it cannot be known; then
            fewer threads are not tried.
    """

    def __init__(self, most: int, delay: Callable[[], float | None] = run_delay) -> None:
        self.count = most
        """Threads for the next step."""
        self._most = most
        self._read_delay = delay
        self._delay: float | None = None
        """When the window's first step began."""
        self._window = _Window()
        self._quiet: dict[int, float] = {}
        """What steps of each size take on all threads while nothing else runs."""
        self._before: dict[int, float] | None = None
        """While another number is tried: what steps took with the number before."""
        self._fallback = most
        self._pause, self._wait = _FIRST_PAUSE, 0
        self._counts = _numbers(most)
        """What is tried, the most first."""
        self._untried: list[int] = []
        """Of the trials that have begun."""
        self._num_logged = 0

    def begin(self) -> int:
        """The number of threads for the step that begins now."""
        # What was delayed while no step ran, between calls, is no concern of the steps.
        if self._most > 1 and not self._window.paces:
            self._delay = self._read_delay()
        return self.count

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the time since ``begin`` for a step of ``tokens`` on ``count`` threads."""
        if self._most == 1:
            return
        self._window.add(tokens, seconds)
        if self._window.is_full or self._trial_is_lost():
            self._judge()

    def _trial_is_lost(self) -> bool:
        """Whether a trial is so bad that it need not be completed: it may be a hundredfold, or
        each of its steps take long."""
        ratio = _ratio(self._window.medians(), self._before) if self._before else None
        return ratio is not None and ratio > (1.0 if self._window.seconds >= _WINDOW_S else _SLOW)

    def _judge(self) -> None:
        window, self._window = self._window, _Window()
        paces = window.medians()
        if self._before is not None:
            self._end_trial(paces, self._before)
        elif self._untried:
            self._try_next(paces)
        elif self._wait:
            self._wait -= 1
        else:
            self._begin_trials(paces, self._delayed_share(window.seconds))

    def _delayed_share(self, seconds: float) -> float | None:
        """Run delay a second in a window; None where it is not known, as without free files."""
        before, after = self._delay, self._read_delay()
        if before is None or after is None:
            return None
        return max(0.0, after - before) / seconds  # threads that have ended take theirs with them

    def _begin_trials(self, paces: dict[int, float], share: float | None) -> None:
        """Try other numbers, unless all threads compute and do not lack cores.

        Fewer wait for less; more get more of cores that all processes share alike. While one thread
        lacks a core the others wait for it, at worst, and else all compute: so much of the time is
        the most that waiting costs, and so few threads as would cost more are not tried.
        """
        delayed = share is not None and share >= _DELAYED
        if self.count == self._most:
            if share is None:
                return
            if not delayed:
                self._quiet |= paces
                return
            slower = _ratio(paces, self._quiet)
            if slower is not None and slower < _SLOW:
                return
        lost = share if delayed and share is not None else 0.0
        fewer = [
            count for count in self._counts if count < self.count and lost > 1 - count / self.count
        ]
        more = [count for count in reversed(self._counts) if count > self.count]
        self._untried = fewer + more
        if self._untried:
            self._try_next(paces)

    def _try_next(self, paces: dict[int, float]) -> None:
        self._before, self._fallback = paces, self.count
        self.count = self._untried.pop(0)

    def _end_trial(self, paces: dict[int, float], before: dict[int, float]) -> None:
        self._before = None
        ratio = _ratio(paces, before)
        # None: steps of other sizes than before, which tell nothing.
        if ratio is not None and ratio <= (_WORTH if self.count < self._fallback else 1.0):
            self._untried = []
            self._pause, self._wait = _FIRST_PAUSE, 0
            self._log_change()
            return
        self.count = self._fallback
        if not self._untried:
            self._wait = self._pause
            self._pause = min(2 * self._pause, _LAST_PAUSE)

    def _log_change(self) -> None:
        """Log that threads step down, and that they are back; once each."""
        if self.count < self._most and self._num_logged == 0:
            self._num_logged = 1
            _LOG.warning(
                "%d of %d threads while other processes use the cores (engine.num_threads keeps a "
                "number)",
                *(self.count, self._most),
            )
        elif self.count == self._most and self._num_logged == 1:
            self._num_logged = 2
            _LOG.warning("all %d threads again", self.count)
