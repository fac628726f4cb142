"""Progress of a running job: a bar on a terminal, or a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from typing import Protocol

from tqdm import tqdm

from batchinfer.console.format import counted_rows, duration
from batchinfer.engine.stats import StepStats

LINE_EVERY_S = 30.0
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows [{elapsed}<{remaining}{postfix}]"


class Progress(Protocol):
    """Display of a job's progress, updated with each step."""

    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        """Add the rows a step finished and its output tokens, and show the pool's use."""
        ...

    def note(self, text: str) -> None:
        """Show ``text`` where the pool's use of one engine would be: of several, say."""
        ...

    def close(self) -> None:
        """End the display and leave the screen in order."""
        ...


def make_progress(total: int, *, quiet: bool) -> Progress:
    """Progress display: a bar on a terminal, lines elsewhere, nothing if ``quiet``; all to stderr.

    Args:
        total: rows to run.
    """
    if quiet or sys.stderr is None:
        return _Silence()
    if sys.stderr.isatty():
        return StallNotice(_Bar(total), partial(tqdm.write, file=sys.stderr))
    return StallNotice(Lines(total), partial(print_line, to_stderr=True))


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print a line; whoever closed the stream has read enough."""
    name = "stderr" if to_stderr else "stdout"
    try:
        print(text, file=getattr(sys, name), flush=True)
    except (OSError, ValueError):
        setattr(sys, name, None)  # Python flushes once more at exit; give it nothing to fail on


class _Silence:
    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Meter:
    """Counts of rows and tokens so far, and the pool's use now.

    Args:
        total: rows to run.
        clock: seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.rows = 0
        self.tokens = 0
        self.pool = 0.0
        self.shared = 0.0
        self.note = ""
        self._clock = clock
        self._began = clock()

    def add(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        """Add a step; arguments as for ``Progress.update``."""
        self.rows += rows
        self.tokens += tokens
        if stats is not None:
            self.pool = stats.kv_blocks_used / stats.kv_blocks_total
            self.shared = stats.kv_blocks_shared / max(stats.kv_blocks_used, 1)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return max(self._clock() - self._began, 1e-9)

    @property
    def rates(self) -> str:
        """Speed and pool, for the end of a progress bar or line."""
        speed = f"{self.tokens / self.elapsed_s:,.0f} tokens/s"
        if self.note:
            return f"{speed}, {self.note}"
        return f"{speed}, pool {self.pool:.0%}, shared {self.shared:.0%}"


class _Bar:
    def __init__(self, total: int) -> None:
        self._counter = Meter(total, time.monotonic)
        self._bar = tqdm(total=total, desc="batchinfer", bar_format=_BAR, dynamic_ncols=True)

    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        self._counter.add(rows, tokens, stats)
        self._bar.set_postfix_str(self._counter.rates, refresh=False)
        self._bar.update(rows)

    def note(self, text: str) -> None:
        self._counter.note = text

    def close(self) -> None:
        self._bar.close()


class Lines:
    """Progress as a plain line every ``LINE_EVERY_S`` seconds.

    Args:
        total: rows to run.
        clock: seconds.
        write: takes a line.
    """

    def __init__(
        self,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = lambda line: print_line(line, to_stderr=True),
    ) -> None:
        self._counter = Meter(total, clock)
        self._write = write
        self._next_s = LINE_EVERY_S

    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        counter = self._counter
        counter.add(rows, tokens, stats)
        elapsed = counter.elapsed_s
        if elapsed >= self._next_s:
            self._next_s = elapsed + LINE_EVERY_S
            line = f"{counter.rows:,} of {counted_rows(counter.total)}, {counter.rates}"
            if counter.rows:
                left = elapsed / counter.rows * (counter.total - counter.rows)
                line += f", about {duration(left)} left"
            self._write(line)

    def note(self, text: str) -> None:
        self._counter.note = text

    def close(self) -> None: ...


class StallNotice:
    """Progress that also says when no step ends: after 30 seconds, then after twice as many.

    Args:
        progress: shows the steps.
        write: takes a line.
        clock: seconds.
    """

    def __init__(
        self,
        progress: Progress,
        write: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._write = write
        self._clock = clock
        self._note_step()
        self._closed = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def update(self, rows: int, tokens: int, stats: StepStats | None) -> None:
        self._progress.update(rows, tokens, stats)
        self._note_step()

    def note(self, text: str) -> None:
        self._progress.note(text)

    def _note_step(self) -> None:
        self._last_s, self._patience_s = self._clock(), LINE_EVERY_S

    def _run(self) -> None:
        while not self._closed.wait(LINE_EVERY_S):
            self.check()

    def check(self) -> None:
        """Say that no step has ended for a while, if that is so."""
        waited = self._clock() - self._last_s
        if waited >= self._patience_s:
            self._patience_s *= 2
            self._write(
                f"no step has ended for {duration(waited)}; if that is long for this model, see "
                "whether its threads have cores: other processes, OMP_NUM_THREADS, cgroup limits"
            )

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._progress.close()
