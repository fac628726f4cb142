"""Sets up a job's process: signals, garbage collection, OpenMP threads, imports."""

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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run. Closing a terminal sends SIGHUP to the programs that run in the
terminal."""
_STDERR = 2

SPIN_COUNT = "10000"
"""Iterations of libgomp's wait loop before a waiting thread sleeps.

libgomp's default is 300,000, which takes milliseconds. Spinning threads can keep the thread that
they wait for from getting a core, so fewer iterations are better if other processes compete for
cores. Without such processes, 1,000 iterations (libgomp's default if there are more threads than
cores) cost a tenth of the speed, and 4,000 were as fast as 300,000.
"""
UNUSED = ("accelerate", "scipy")
"""Packages that transformers imports for every model if they are installed. batchinfer does not use
these packages, and skipping them saves 0.3 s of a startup of 4.5 s.
"""


def _stopped() -> bytes:
    message = b"stopped; run the same command again\n"
    if not os.isatty(_STDERR):
        return message
    # The line may contain a progress message and the terminal's ^C.
    return (b"\n" if os.environ.get("TERM") == "dumb" else b"\r\x1b[K") + message


_farewell: tuple[int, Callable[[], bytes]] = (_STDERR, _stopped)
"""What to write when a signal ends the process: a file descriptor, and a function that returns the
message.
"""


@contextmanager
def leaves_at_once() -> Iterator[None]:
    """Make ``SystemExit`` end the process right after the ``atexit`` handlers, without unloading
    modules.

    Unloading torch and triton takes two seconds.
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
    if not codes:  # Python already shows an error
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the stream is missing, full or closed
            stream.flush()
    os._exit(codes[0])


def leave_on_signals(farewell: Callable[[], bytes] = _stopped, descriptor: int = _STDERR) -> None:
    """Make ``SIGNALS`` end the process at once; use this while no work can be lost.

    No exception is raised, because it could interrupt an import and leave half a module behind.

    Args:
        farewell: returns the last message, which is written to ``descriptor``.
    """
    global _farewell
    _farewell = (descriptor, farewell)
    _handle_with(_leave)


def ignore_signals() -> None:
    """Ignore ``SIGNALS``, because the process is about to end."""
    _handle_with(signal.SIG_IGN)


def _handle_with(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _handled():
            signal.signal(number, handler)


def _handled() -> Iterator[signal.Signals]:
    """Yield ``SIGNALS``, but not SIGHUP if ``nohup`` started the process with SIGHUP ignored."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            yield number


def _leave(_number: int, _frame: FrameType | None) -> None:
    descriptor, farewell = _farewell
    with suppress(OSError):
        os.write(descriptor, farewell())
    os._exit(ExitCode.INTERRUPTED)


class SignalledEvent(threading.Event):
    """An event that a signal handler may set at any time.

    ``Event.set`` takes a lock. If a signal interrupts a thread in ``Event.wait`` that holds this
    lock, setting the event in the handler would deadlock. ``SimpleQueue.put`` is reentrant.
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
                # Put the item back for other waiting threads.
                self._woken.put(self._woken.get(timeout=timeout))
        return self._is_set


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that any of ``SIGNALS`` sets; a second SIGINT ends the process.

    If ``leave_on_signals`` was active before, the process ignores signals afterwards, because a
    late signal must not change the exit code. Outside the main thread, where Python handles no
    signals, the event is never set.
    """
    stop = SignalledEvent()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            os._exit(ExitCode.INTERRUPTED)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in _handled()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if handler is _leave else handler)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection, unless the caller already froze objects.

    A full collection walks every object of torch, transformers and the model, which takes a quarter
    of a second in the middle of a run.
    """
    is_ours = not gc.get_freeze_count()  # ``unfreeze`` would affect the caller's objects too
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, and move objects created meanwhile to the oldest generation.

    Importing torch and transformers and loading a model creates a million long-lived objects.
    Walking them repeatedly takes a fifth of the startup time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # moves objects into the oldest generation
            gc.enable()


def bound_spinning() -> None:
    """Make OpenMP threads of this process and its children sleep after a short wait.

    The call has no effect if the environment already sets how threads wait, or if torch is loaded.
    """
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    if "torch" not in sys.modules and not any(name in os.environ for name in names):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def skip_optional_imports() -> None:
    """Make imports treat the packages in ``UNUSED`` as not installed.

    Call this only in batchinfer's own processes, because a notebook may need these packages.
    """
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: not found
