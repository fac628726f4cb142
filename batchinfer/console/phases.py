"""Phases: named waits of a run, such as loading the model.

Slow code runs inside ``with phase("loading the model")``, which does not need to know its caller.
The program activates a ``Phases`` object, which shows and records phases. Without an active object,
for example in a notebook, phases do nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, RLock, Thread
from typing import Protocol, Self

from batchinfer.console.format import duration, printable
from batchinfer.console.terminal import LINE_EVERY_S, TerminalLine, print_line

SHOWN_AFTER_S = 0.5
"""Seconds after which a phase is shown."""
_TICK_S = 0.25
_GIGA = 1e9


class PhaseView(Protocol):
    def lasts(self, name: str, detail: str, seconds: float) -> None:
        """Show that a phase has lasted ``seconds``; called repeatedly.

        Args:
            detail: progress of the phase; "" if it is unknown.
        """
        ...

    def ended(self, name: str, detail: str, seconds: float) -> None:
        """Show that a phase has ended, or that another phase has begun inside it."""
        ...


class StatusLine:
    """Shows the current phase on a line of a terminal; the next phase replaces it."""

    def __init__(self) -> None:
        self._line: TerminalLine | None = None

    def lasts(self, name: str, detail: str, seconds: float) -> None:
        if self._line is None:
            self._line = TerminalLine()
        self._line.show(printable(phase_line(name, detail, seconds)))

    def ended(self, name: str, detail: str, seconds: float) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


class PhaseLines:
    """Writes a line for each phase that has ended, and a few lines during a long phase."""

    def __init__(
        self, write: Callable[[str], None] = lambda line: print_line(line, to_stderr=True)
    ) -> None:
        self._write = write
        self._next_s = LINE_EVERY_S

    def lasts(self, name: str, detail: str, seconds: float) -> None:
        if seconds >= self._next_s:
            self._next_s = 2 * seconds
            self._write(f"still {printable(phase_line(name, detail, seconds))}")

    def ended(self, name: str, detail: str, seconds: float) -> None:
        self._next_s = LINE_EVERY_S
        self._write(printable(phase_line(name, detail, seconds)))


def make_phase_view(*, quiet: bool) -> PhaseView | None:
    """Return a view on stderr: one line on a terminal, lines elsewhere, None if ``quiet``."""
    if quiet or sys.stderr is None:
        return None
    return StatusLine() if sys.stderr.isatty() else PhaseLines()


class Phase:
    """A wait and its progress.

    Args:
        total: amount of work; 0 if unknown.
        unit: unit of ``total``: ``bytes``, or a plural noun such as ``files``.
    """

    def __init__(self, name: str, total: float = 0, unit: str = "") -> None:
        self.name = name
        self._done, self._total, self._unit = 0.0, float(total), unit
        self._lock = RLock()

    def advance(self, amount: float) -> None:
        """Count finished work. Any thread may call this."""
        with self._lock:
            self._done += amount

    def set_share(self, share: float) -> None:
        """Set the share of the work that is finished, from 0 to 1."""
        self._done = share * self._total

    @property
    def detail(self) -> str:
        """Progress, such as ``3.2 of 14.9 GB``; "" if unknown."""
        if not self._total:
            return ""
        done = min(self._done, self._total)
        if self._unit == "bytes":
            return f"{done / _GIGA:,.1f} of {self._total / _GIGA:,.1f} GB"
        return f"{done:,.0f} of {self._total:,.0f}{self._unit and ' '}{self._unit}"


class Phases:
    """The current phase of a run, and the seconds of each phase so far.

    An inner phase replaces the outer phase while it lasts, so the times of all phases add up to at
    most the elapsed time.

    Args:
        view: shows phases; None to show no phases.
    """

    def __init__(
        self, view: PhaseView | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds of the ended phases, summed by name, in the order of first use."""
        self._view = view
        self._clock = clock
        self._stack: list[Phase] = []
        self._began_s = 0.0
        self._is_shown = False
        self._lock = RLock()
        self._closed = Event()
        self._thread: Thread | None = None

    @property
    def current(self) -> tuple[str, str, float] | None:
        """Name, detail and seconds of the current phase; None if no phase is active."""
        with self._lock:
            if not self._stack:
                return None
            phase = self._stack[-1]
            return phase.name, phase.detail, self._clock() - self._began_s

    @contextmanager
    def during(self, phase: Phase) -> Iterator[Phase]:
        with self._lock:
            self._end_current()
            self._stack.append(phase)
        try:
            yield phase
        finally:
            with self._lock:
                self._end_current()
                self._stack.remove(phase)

    def check(self) -> None:
        """Show the current phase if it has lasted long enough."""
        with self._lock:
            current = self.current
            if current is None or self._view is None or self._closed.is_set():
                return
            if current[2] >= SHOWN_AFTER_S:
                self._is_shown = True
                self._view.lasts(*current)

    def __enter__(self) -> Self:
        """Make this object the active ``Phases``."""
        if self._view is not None:
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _end_current(self) -> None:
        """Count the time of the current phase up to now, and end its display."""
        if (current := self.current) is not None:
            name, _, seconds = current
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            if self._view is not None and (self._is_shown or seconds >= SHOWN_AFTER_S):
                self._view.ended(*current)
        self._began_s, self._is_shown = self._clock(), False

    def _run(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.check()


_active: list[Phases] = []
"""Active objects; the last object is in use."""


def active_phases() -> Phases | None:
    return _active[-1] if _active else None


@contextmanager
def phase(name: str, total: float = 0, unit: str = "") -> Iterator[Phase]:
    """Record the time spent in the context as a phase; see ``Phase`` for the arguments."""
    begun, active = Phase(name, total, unit), active_phases()
    if active is None:
        yield begun
        return
    with active.during(begun):
        yield begun


def phase_line(name: str, detail: str, seconds: float) -> str:
    return f"{name}{detail and ': '}{detail}, {duration(seconds)}"
