"""The process a job runs in: its signals, garbage collector, idle OpenMP threads, imports."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType

from batchinfer.errors import ExitCode

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

SPIN_COUNT = "10000"
"""Turns of libgomp's loop before a thread that waits goes to sleep.

libgomp's default is 300,000, milliseconds in which a thread that others wait for may lack a core:
beside other processes fewer turns are better. But 1,000, which libgomp itself takes where more
threads run than there are cores, cost a tenth of the speed alone, measured; 4,000 to 300,000 could
not be told apart there.
"""
_TOLD_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
UNUSED = ("accelerate", "scipy")
"""Packages that transformers imports for every model wherever they are installed: for models spread
over devices, and for training object detectors. A start of 4.5 s takes 0.3 s less without them."""


_STDERR = 2


def _stopped() -> bytes:
    said = b"stopped; run the same command again\n"
    if not os.isatty(_STDERR):
        return said
    # There may be a wait's line, and the terminal's own ^C in it.
    return (b"\n" if os.environ.get("TERM") == "dumb" else b"\r\x1b[K") + said


_farewell: tuple[int, Callable[[], bytes]] = (_STDERR, _stopped)
"""Where to say what, when a signal ends the process at once."""


@contextmanager
def leaves_at_once() -> Iterator[None]:
    """Have the process end by ``SystemExit`` without taking apart what it has loaded.

    Of torch and triton that takes two seconds. What is registered with ``atexit`` inside is done
    before.
    """
    codes: list[int] = []
    atexit.register(_end_at_once, codes)  # the first to be registered comes last
    try:
        yield
    except SystemExit as done:
        if done.code is None or isinstance(done.code, int):
            codes.append(done.code or 0)
        raise


def _end_at_once(codes: list[int]) -> None:
    if not codes:  # Python has an error to show
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, full or closed
            stream.flush()
    os._exit(codes[0])


def leave_on_signals(farewell: Callable[[], bytes] = _stopped, descriptor: int = _STDERR) -> None:
    """End the process at once on SIGINT, SIGTERM and SIGUSR1: nothing is in flight yet.

    No exception is raised for them: one that meets an import leaves half a module behind.

    Args:
        farewell: what is written last.
        descriptor: where.
    """
    global _farewell
    _farewell = (descriptor, farewell)
    _handle_with(_leave)


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGUSR1 from here on: the process is on its way out."""
    _handle_with(signal.SIG_IGN)


def _handle_with(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, handler)


def _leave(_number: int, _frame: FrameType | None) -> None:
    descriptor, farewell = _farewell
    with suppress(OSError):
        os.write(descriptor, farewell())
    os._exit(ExitCode.INTERRUPTED)


class SignalledEvent(threading.Event):
    """An event that a signal's handler may set, whatever the thread it interrupts is about.

    ``Event.set`` takes a lock; a thread that is interrupted in ``Event.wait`` while it holds that
    lock would wait for itself. ``SimpleQueue.put`` may interrupt ``get`` and itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._woken = SimpleQueue[None]()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._woken.put(None)

    def clear(self) -> None:
        raise NotImplementedError("a signal is not taken back")

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            with suppress(Empty):
                self._woken.put(self._woken.get(timeout=timeout))  # for others that wait
        return self._is_set


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set an event on SIGINT, SIGTERM and SIGUSR1; a second SIGINT ends the process at once.

    Where ``leave_on_signals`` held before, signals are ignored afterwards, as by
    ``ignore_signals``: what was asked for is done or was given up, and no moment is left in which
    a signal could make the exit code say otherwise. Outside the main thread, where Python takes
    no signals, the event is never set.
    """
    stop = SignalledEvent()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            os._exit(ExitCode.INTERRUPTED)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is _leave else handler)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Keep what exists already out of garbage collections.

    A full one walks every object of torch, transformers and the model: a quarter of a second, in
    the middle of a run. Nothing is lost: afterwards collections look at everything again. Where a
    caller has frozen objects already, all stays as it is: they could not be told apart later.
    """
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collections.

    Importing torch and transformers and loading a model makes a million objects that all stay: to
    look at them again and again takes a fifth of the time of a start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _make_old()
            gc.enable()


def _make_old() -> None:
    """Move what exists to the oldest generation: else the next collection walks it all."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def bound_spinning() -> None:
    """Have the OpenMP threads of this process, and of those it starts, sleep after a short wait.

    Does nothing where the environment says how they wait, or where torch is loaded already.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _TOLD_BY):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def skip_optional_imports() -> None:
    """Have imports in this process find ``UNUSED`` missing, as where they are not installed.

    For a process that is ours alone: a notebook may use transformers for more.
    """
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: not to be found
