"""Progress of a running job: a bar on a terminal, or a line now and then."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, Protocol

from tqdm import tqdm

from batchinfer.console.format import duration
from batchinfer.console.meter import Counts, Meter
from batchinfer.engine.stats import StepStats

LINE_EVERY_S = 30.0
_DRAW_EVERY_S = 0.1
_BAR = "{desc}: {percentage:3.0f}%|{bar}| TAIL"


class Progress(Protocol):
    """Display of a job's progress, updated with each step."""

    def update(self, added: Counts, stats: StepStats | None) -> None:
        """Add what a step has done, and show the pool's use."""
        ...

    def fail(self, rows: int) -> None:
        """Count rows that ended in an error; from the thread that writes them."""
        ...

    def reuse(self, rows: int) -> None:
        """Add rows that were copied from another output; call it from any thread."""
        ...

    def note(self, text: str) -> None:
        """Show ``text`` where the pool's use of one engine would be: of several, say."""
        ...

    def close(self) -> None:
        """End the display and leave the screen in order."""
        ...


def make_progress(meter: Meter, *, quiet: bool) -> Progress:
    """Progress display: a bar on a terminal, lines elsewhere, nothing if ``quiet``; all to stderr.

    Args:
        meter: counts, and is shown.
    """
    if quiet or sys.stderr is None:
        return Metered(meter)
    if sys.stderr.isatty():
        return StallNotice(_Bar(meter), partial(tqdm.write, file=sys.stderr))
    return StallNotice(Lines(meter), partial(print_line, to_stderr=True))


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print a line; whoever closed the stream has read enough."""
    name = "stderr" if to_stderr else "stdout"
    try:
        print(text, file=getattr(sys, name), flush=True)
    except (OSError, ValueError):
        setattr(sys, name, None)  # Python flushes once more at exit; give it nothing to fail on


class Metered:
    """What displays of progress have in common: they count with a meter, and show it when due."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lock = Lock()  # steps are told by one thread, rows that are copied by another

    def update(self, added: Counts, stats: StepStats | None) -> None:
        """Add what a step has done."""
        with self._lock:
            self._meter.add(added, stats)
            self._show_if_due()

    def fail(self, rows: int) -> None:
        """Count rows that ended in an error."""
        self._meter.failed += rows

    def reuse(self, rows: int) -> None:
        """Add rows that were copied."""
        with self._lock:
            self._meter.reused += rows
            self._show_if_due()

    def note(self, text: str) -> None:
        """Show a text in place of the pool's use."""
        self._meter.note = text

    def close(self) -> None:
        """Show nothing any more."""

    def _show_if_due(self) -> None: ...


class _Bar(Metered):
    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self._bar: Any = None
        self._drawn_s = -math.inf

    def _show_if_due(self) -> None:
        now = time.monotonic()
        if now - self._drawn_s >= _DRAW_EVERY_S:
            self._drawn_s = now
            self._draw()

    def _draw(self) -> None:
        meter = self._meter
        if self._bar is None:  # not before: a wait that has a name may have the line until then
            self._bar = tqdm(total=1.0, desc="batchinfer", bar_format="{desc}", dynamic_ncols=True)
        left = "" if meter.eta_s is None else f"<{tqdm.format_interval(meter.eta_s)}"
        at_most = " at most" if left and meter.expects_most else ""
        passed = f"[{tqdm.format_interval(meter.elapsed_s)}{left}{at_most}, {meter.rates}]"
        rows = f"{meter.before + meter.rows_finished:,}/{meter.before + meter.total:,} rows"
        self._bar.bar_format = _BAR.replace("TAIL", f"{rows} {passed}")
        self._bar.n = meter.share
        self._bar.refresh()

    def close(self) -> None:
        self._draw()
        self._bar.close()


class Lines(Metered):
    """Progress as a plain line every ``LINE_EVERY_S`` seconds.

    Args:
        meter: counts, and is shown.
        write: takes a line.
    """

    def __init__(
        self,
        meter: Meter,
        write: Callable[[str], None] = lambda line: print_line(line, to_stderr=True),
    ) -> None:
        super().__init__(meter)
        self._write = write
        self._next_s = LINE_EVERY_S

    def _show_if_due(self) -> None:
        elapsed = self._meter.elapsed_s
        if elapsed >= self._next_s:
            self._next_s = elapsed + LINE_EVERY_S
            self._write(self._meter.line)


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

    def update(self, added: Counts, stats: StepStats | None) -> None:
        self._progress.update(added, stats)
        self._note_step()

    def fail(self, rows: int) -> None:
        self._progress.fail(rows)

    def reuse(self, rows: int) -> None:
        self._progress.reuse(rows)
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
