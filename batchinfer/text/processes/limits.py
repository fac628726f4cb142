"""Limits of a worker process that the operating system enforces: CPU time, real time, memory.

A timer ends the process by the default action of a signal, which no code in the process can delay.
Such a timer interrupts a regular expression in native code as well as a loop in Python. One timer
counts the process's own processor time (setitimer(2), ``ITIMER_PROF``), so a busy or suspended
machine does not matter. A second, generous timer (``ITIMER_REAL``) ends a process that waits
without computing. This timer also runs while the process is stopped or its virtual machine is
paused, so a row that exceeds this limit runs once more with a longer limit before the row is
blamed. Memory is limited as address space (setrlimit(2), ``RLIMIT_AS``), because Linux cannot limit
resident memory. macOS supports neither limit (``setrlimit`` fails), so memory is unlimited on
macOS; see ``BOUNDS_MEMORY``.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from batchinfer.process.process import SIGNALS

BYTES_PER_PIXEL = 24
"""Bytes of address space per pixel that preparing an image may take. The processors of the
supported families need up to 18 bytes: Pillow's picture has 4, and several copies exist while a
processor works."""


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_seconds: float = 10.0
    """Seconds of processor time for a row that runs alone."""
    shared_cpu_seconds: float = 2.5
    """Seconds of processor time for a batch of rows. If a batch takes longer, its rows run one by
    one."""
    seconds: float = 60.0
    """Seconds of wall-clock time for a row or a batch."""
    patient_seconds: float = 300.0
    """Seconds of wall-clock time for a row that runs again after it exceeded ``seconds``."""
    memory_bytes: int = 2**30
    """Bytes of address space that the process may use beyond its size at the start."""

    def for_images(self, max_pixels: int) -> Limits:
        """Return limits under which the process can prepare images of ``max_pixels`` pixels."""
        needed = BYTES_PER_PIXEL * max_pixels
        return replace(self, memory_bytes=max(self.memory_bytes, needed))


BOUNDS_MEMORY = sys.platform == "linux"
"""True if this system limits a process's memory."""


def leave_signals_to_parent() -> None:
    """Ignore signals that a terminal or a scheduler sends to all processes of a job.

    The job's main process handles them, and its worker processes end with it.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGALRM):  # the parent may have ignored these signals
        signal.signal(number, signal.SIG_DFL)


def bound_memory(added_bytes: int) -> None:
    """Limit this process's address space to its size plus ``added_bytes``; write no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not BOUNDS_MEMORY:
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + added_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


@contextmanager
def bounded_time(cpu_seconds: float, seconds: float) -> Iterator[None]:
    """End this process if the body exceeds its processor time (SIGPROF) or real time (SIGALRM)."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
