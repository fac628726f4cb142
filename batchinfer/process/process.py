"""The process that a job runs in: signals, garbage collection, OpenMP threads, imports."""

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
_STDERR = 2

SPIN_COUNT = "10000"
"""Turns of libgomp's loop before a waiting thread goes to sleep.

libgomp's default is 300,000: milliseconds in which a thread that others wait for may have no core,
so that fewer turns are better beside other processes. But 1,000, which libgomp itself uses where
more threads run than there are cores, cost a tenth of the speed when measured alone; 4,000 to
300,000 made no difference there.
"""
UNUSED = ("accelerate", "scipy")
"""Packages that transformers imports for every model wherever they are installed, to spread models
over devices and to train object detectors. Without them a start of 4.5 s takes 0.3 s less."""


def _stopped() -> bytes:
    message = b"stopped; run the same command again\n"
    if not os.isatty(_STDERR):
        return message
    # The line may contain a progress message, and the terminal's own ^C.
    return (b"\n" if os.environ.get("TERM") == "dumb" else b"\r\x1b[K") + message


_farewell: tuple[int, Callable[[], bytes]] = (_STDERR, _stopped)
"""File descriptor and message for when a signal ends the process at once."""


@contextmanager
def leaves_at_once() -> Iterator[None]:
    """Have ``SystemExit`` end the process without tearing down its modules, after ``atexit``.

    The tear-down of torch and triton takes two seconds.
    """
    codes: list[int] = []
    atexit.register(_end_at_once, codes)  # registered first, so it runs last
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
        with suppress(AttributeError, OSError, ValueError):  # missing, full or closed
            stream.flush()
    os._exit(codes[0])


def leave_on_signals(farewell: Callable[[], bytes] = _stopped, descriptor: int = _STDERR) -> None:
    """End the process at once on SIGINT, SIGTERM and SIGUSR1, while it has no work to lose.

    No exception is raised: it could interrupt an import and leave half a module behind.

    Args:
        farewell: returns the last message, which is written to ``descriptor``.
    """
    global _farewell
    _farewell = (descriptor, farewell)
    _handle_with(_leave)


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGUSR1 from here on, as the process is about to end."""
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
    """An event that a signal handler may set, whatever the interrupted thread is doing.

    ``Event.set`` takes a lock; a thread that is interrupted in ``Event.wait`` while it holds that
    lock would deadlock. ``SimpleQueue.put`` is reentrant.
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
        raise NotImplementedError("a signal cannot be undone")

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            with suppress(Empty):
                self._woken.put(self._woken.get(timeout=timeout))  # for other threads that wait
        return self._is_set


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set an event on SIGINT, SIGTERM and SIGUSR1; a second SIGINT ends the process at once.

    If ``leave_on_signals`` was active before, signals are ignored afterwards: the outcome is
    decided, and a late signal must not change the exit code. Outside the main thread, where Python
    handles no signals, the event is never set.
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
    """Exclude existing objects from garbage collections, unless a caller has frozen objects.

    A full collection walks every object of torch, transformers and the model, which takes a quarter
    of a second in the middle of a run.
    """
    is_ours = not gc.get_freeze_count()  # else ``unfreeze`` would undo the caller's too
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collections, and have the next one skip what was made meanwhile.

    Importing torch and transformers and loading a model makes a million objects that all stay;
    walking them again and again takes a fifth of the time of a start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()


def bound_spinning() -> None:
    """Have the OpenMP threads of this process and its children sleep after a short wait.

    Does nothing where the environment sets how they wait, or where torch is loaded already.
    """
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    if "torch" not in sys.modules and not any(name in os.environ for name in names):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def skip_optional_imports() -> None:
    """Make ``UNUSED`` look not installed to imports.

    For processes of this program only: a notebook may use more of transformers.
    """
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: not found
