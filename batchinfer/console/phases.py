"""Phases: the waits of a run that have a name, such as loading the model.

Whoever makes others wait says so where that happens, ``with phase("loading the model")``, however
deep in the call that is; who runs the program makes a ``Phases`` the active one and shows them.
Where none is active, as in a library, nobody is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, RLock, Thread
from typing import Protocol, Self

from batchinfer.console.format import duration

SHOWN_AFTER_S = 0.5
"""Shorter phases are not told of."""
_TICK_S = 0.25
_GIGA = 1e9


class PhaseView(Protocol):
    """Shows phases."""

    def lasts(self, name: str, detail: str, seconds: float) -> None:
        """Show that a phase has lasted so long; called again and again.

        Args:
            detail: how far it is; "" where nobody knows.
        """
        ...

    def ended(self, name: str, detail: str, seconds: float) -> None:
        """Show that a phase that ``lasts`` was called for has ended, or makes room for another."""
        ...


class Phase:
    """A wait that goes on, and how far it is.

    Args:
        total: what there is to do; 0: not known.
        unit: of ``total``: ``bytes``, or what is counted.
    """

    def __init__(self, name: str, total: float = 0, unit: str = "") -> None:
        self.name = name
        self._done, self._total, self._unit = 0.0, float(total), unit
        self._lock = RLock()

    def advance(self, amount: float) -> None:
        """Count what is done; from any thread."""
        with self._lock:
            self._done += amount

    def set_share(self, share: float) -> None:
        """Set how much of all is done, from 0 to 1."""
        self._done = share * self._total

    @property
    def detail(self) -> str:
        """How far it is, such as ``3.2 of 14.9 GB``; "" where nobody knows."""
        if not self._total:
            return ""
        done = min(self._done, self._total)
        if self._unit == "bytes":
            return f"{done / _GIGA:,.1f} of {self._total / _GIGA:,.1f} GB"
        return f"{done:,.0f} of {self._total:,.0f}{self._unit and ' '}{self._unit}"


class Phases:
    """The phases of a run: what it waits for now, and how long it has waited for what.

    A phase inside another takes its place while it lasts, so that the times of all add up to no
    more than has passed.

    Args:
        view: shows those that last; None: nobody is told.
        clock: seconds.
    """

    def __init__(
        self, view: PhaseView | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds: dict[str, float] = {}
        """How long each has lasted, in the order they began; those that have ended, and the times
        of one name added up."""
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
        """Name, how far it is, and seconds of the phase that lasts now; None: there is none."""
        with self._lock:
            if not self._stack:
                return None
            phase = self._stack[-1]
            return phase.name, phase.detail, self._clock() - self._began_s

    @contextmanager
    def during(self, phase: Phase) -> Iterator[Phase]:
        """Have ``phase`` last."""
        with self._lock:
            self._change(lambda: self._stack.append(phase))
        try:
            yield phase
        finally:
            with self._lock:
                self._change(lambda: self._stack.remove(phase))

    def check(self) -> None:
        """Show the current phase, if it has lasted."""
        with self._lock:
            current = self.current
            if current is None or self._view is None or self._closed.is_set():
                return
            if current[2] >= SHOWN_AFTER_S:
                self._is_shown = True
                self._view.lasts(*current)

    def __enter__(self) -> Self:
        """Make these the active phases."""
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

    def _change(self, change: Callable[[], None]) -> None:
        """End what lasts, and begin what is on top after a change."""
        now = self._clock()
        if self._stack:
            phase, seconds = self._stack[-1], now - self._began_s
            self.seconds[phase.name] = self.seconds.get(phase.name, 0.0) + seconds
            if self._view is not None and (self._is_shown or seconds >= SHOWN_AFTER_S):
                self._view.ended(phase.name, phase.detail, seconds)
        change()
        self._began_s, self._is_shown = now, False

    def _run(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.check()


_active: list[Phases] = []
"""The last one is told."""


def active_phases() -> Phases | None:
    """The phases that are told of; None where nobody is."""
    return _active[-1] if _active else None


@contextmanager
def phase(name: str, total: float = 0, unit: str = "") -> Iterator[Phase]:
    """Tell the active phases that what is done inside is waited for; as for ``Phase``."""
    begun, active = Phase(name, total, unit), active_phases()
    if active is None:
        yield begun
        return
    with active.during(begun):
        yield begun


def phase_line(name: str, detail: str, seconds: float) -> str:
    """A phase on one line."""
    return f"{name}{detail and ': '}{detail}, {duration(seconds)}"
