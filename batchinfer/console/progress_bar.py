"""Shows the progress of a job: a bar on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from threading import Event, Lock, Thread
from typing import Protocol

from tqdm.utils import disp_len

from batchinfer.console.format import duration, whole_percent
from batchinfer.console.meter import Counts, Meter
from batchinfer.console.terminal import (
    LINE_EVERY_S,
    TerminalLine,
    columns,
    has_drawing_characters,
    print_line,
    styled,
)
from batchinfer.engine.stats import StepStats

_DRAW_EVERY_S = 0.1
_LEAST_CELLS, _MOST_CELLS = 8, 28


class Progress(Protocol):
    def update(self, added: Counts, stats: StepStats | None) -> None:
        """Add the counts of a step, and show the use of the KV pool."""

    def fail(self, rows: int) -> None:
        """Count failed rows. The thread that writes rows calls this."""

    def reuse(self, rows: int) -> None:
        """Count rows copied from another output. Any thread may call this."""

    def note(self, text: str) -> None:
        """Show ``text``, for example about several engines, instead of the use of the KV pool."""

    def close(self) -> None:
        """Stop showing progress, and clean up the terminal line."""


class MeteredProgress(Progress):
    """Counts progress with a meter. Subclasses also show it.

    Args:
        warn: receives a line if no step has ended for 30 s, 60 s, 120 s and so on; None to
            never warn.
    """

    def __init__(
        self,
        meter: Meter,
        warn: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter = meter
        self._warn = warn
        self._clock = clock
        self._lock = Lock()  # one thread counts steps, another counts copied rows
        self._closed = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._note_step()
        if warn is not None:
            self._thread.start()

    def update(self, added: Counts, stats: StepStats | None) -> None:
        with self._lock:
            self.meter.add(added, stats)
            self._show_if_due()
        self._note_step()

    def fail(self, rows: int) -> None:
        self.meter.failed += rows

    def reuse(self, rows: int) -> None:
        with self._lock:
            self.meter.reused += rows
            self._show_if_due()
        self._note_step()

    def note(self, text: str) -> None:
        self.meter.note = text

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Warn if no step has ended for a while."""
        waited = self._clock() - self._last_s
        if self._warn is not None and waited >= self._patience_s:
            self._patience_s *= 2
            self._warn(
                f"no step has finished for {duration(waited)}; if that is unusual "
                "for this model, check whether other processes, OMP_NUM_THREADS or "
                "cgroup limits leave the engine too few cores"
            )

    def _show_if_due(self) -> None: ...

    def _note_step(self) -> None:
        self._last_s, self._patience_s = self._clock(), LINE_EVERY_S

    def _watch(self) -> None:
        while not self._closed.wait(LINE_EVERY_S):
            self.check()


class Lines(MeteredProgress):
    def __init__(
        self,
        meter: Meter,
        write: Callable[[], object],
        every_s: float,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(meter, warn)
        self._write = write
        self._every_s = self._next_s = every_s

    def _show_if_due(self) -> None:
        elapsed = self.meter.elapsed_s
        if elapsed >= self._next_s:
            self._next_s = elapsed + self._every_s
            self._write()


class Bar(MeteredProgress):
    """Shows progress on a line of the terminal, which it rewrites."""

    def __init__(self, meter: Meter, warn: Callable[[str], object] | None = None) -> None:
        super().__init__(meter, warn)
        self._line: TerminalLine | None = None
        self._drawn_s = -math.inf

    def _show_if_due(self) -> None:
        now = time.monotonic()
        if now - self._drawn_s >= _DRAW_EVERY_S:
            self._drawn_s = now
            if self._line is None:  # created only now, because a phase may have used the line
                self._line = TerminalLine()
            self._line.show(bar_line(self.meter, columns()))

    def close(self) -> None:
        super().close()
        if self._line is not None:
            self._line.close(last_line(self.meter, columns()))


def make_progress(meter: Meter, *, quiet: bool) -> Progress:
    """Return a display on stderr: a bar on a terminal, lines elsewhere, nothing if ``quiet``."""
    if quiet or sys.stderr is None:
        return MeteredProgress(meter)
    write = partial(print_line, to_stderr=True)
    if sys.stderr.isatty():
        return Bar(meter, write)
    return Lines(meter, lambda: write(meter.line), LINE_EVERY_S, write)


def bar_line(meter: Meter, width: int) -> str:
    """Return the progress in at most ``width`` columns, with the most important facts first."""
    cells = max(_LEAST_CELLS, min(width // 6, _MOST_CELLS))
    line = f"{whole_percent(meter.share):>4} {draw_bar(meter.share, cells)}"
    return _filled(line, zip(chain(["  ", " "], repeat(", ")), _facts(meter), strict=False), width)


def last_line(meter: Meter, width: int) -> str:
    """Return the progress at the end of a run, with speeds if there is room."""
    is_done = meter.rows_finished == meter.total
    share = "" if is_done else f" ({whole_percent(meter.rows_share)})"
    mine = f", {meter.rows_finished:,} of them" if meter.before else ""
    failed = f", {styled(f'{meter.failed:,} failed', 'bad')}" if meter.failed else ""
    line = f"{meter.rows_line}{share}{mine} in {duration(meter.elapsed_s)}{failed}"
    return _filled(line, [(", ", speed) for speed in meter.speeds], width)


def draw_bar(share: float, cells: int) -> str:
    """Draw a bar that is readable without colors: the finished part has a heavier line."""
    full = math.floor(cells * min(max(share, 0.0), 1.0))
    done, left = ("━", "─") if has_drawing_characters() else ("#", ".")
    return styled(done * full, "bar") + styled(left * (cells - full), "dim")


def _filled(line: str, texts: Iterable[tuple[str, str]], width: int) -> str:
    """Append texts, each after its separator, until the next text does not fit."""
    for separator, text in texts:
        longer = f"{line}{separator}{text}"
        if disp_len(longer) > width:
            break
        line = longer
    return line


def _facts(meter: Meter) -> Iterator[str]:
    yield meter.rows_line
    yield "finished"  # rows_line counts only finished rows, but the bar also shows running rows
    if meter.failed:
        yield styled(f"{meter.failed:,} failed", "bad")
    if meter.eta_s is not None:
        yield meter.left
    if meter.rows_running:
        yield meter.running_line
    yield from meter.rates.split(", ")
    yield f"{duration(meter.elapsed_s)} so far"
