"""Limits of a child process that the kernel enforces: processor time, time, memory.

Timers end the process by the signal's default action, which no code in it can delay: a regular
expression in native code is interrupted like a loop in Python. What is counted is the process's own
processor time (setitimer(2), ``ITIMER_PROF``), so that a busy or suspended machine changes nothing;
a second, generous timer (``ITIMER_REAL``) ends what waits without computing (and, as it runs on
while a process is stopped or a virtual machine paused, blames nobody at once). Memory is bounded as
address space (setrlimit(2), ``RLIMIT_AS``): Linux does not bound resident memory. macOS has no such
limit (``setrlimit`` fails): there memory is not bounded, and ``BOUNDS_MEMORY`` says so.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may take."""

    cpu_seconds: float = 10.0
    """Processor time that a row alone may take."""
    shared_cpu_seconds: float = 2.5
    """Processor time of rows done together: those that take more are done one by one."""
    seconds: float = 60.0
    """Time that a row alone, or rows together, may take, computing or not."""
    patient_seconds: float = 300.0
    """The same for rows that are done again because ``seconds`` were over."""
    memory_bytes: int = 2**30
    """Address space that it may add to what it was started with."""


BOUNDS_MEMORY = sys.platform == "linux"
"""Whether this system bounds a process's memory."""

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def leave_signals_to_parent() -> None:
    """Ignore what a terminal or a scheduler sends to all of a job's processes: its own process
    decides, and when that is gone so are its children."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGALRM):  # whoever started us may ignore them
        signal.signal(number, signal.SIG_DFL)


def bound_memory(added_bytes: int) -> None:
    """Bound this process's address space to what it has and ``added_bytes``; no core files."""
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
    """End this process if what is inside takes more processor time (SIGPROF) or time (SIGALRM)."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
