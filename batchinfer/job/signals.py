"""Being asked to stop: finish the running step, keep what is complete, leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchinfer.errors import ExitCode

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Within, SIGINT, SIGTERM and SIGUSR1 set the event; a second SIGINT ends the process at once.

    Outside the main thread, where Python takes no signals, the event is never set.
    """
    stop = threading.Event()

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
            signal.signal(number, handler)
